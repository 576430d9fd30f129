"""The fields of megatron-core's TransformerConfig by version, as data, for where megatron-core is not installed.

`fields/<minor version>.json` has every field's default where that is a plain value, and what its annotation says that
can be judged: a truth value, or a list of choices. A test holds each file against the version itself.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib.resources import files
from typing import Any, Literal

from moeref.config.errors import ConfigError
from moeref.dispatcher.setup import minor_version


@functools.cache
def versions() -> tuple[str, ...]:
    """The minor versions whose fields are known, such as `0.19`."""
    folder = files("moeref.config").joinpath("fields")
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


@functools.cache
def transformer_config(version: str, *, mla: bool = False) -> type:
    """A dataclass with the fields of that version's TransformerConfig, or MLATransformerConfig; for `resolve`.

    It derives and validates nothing, and a default that is no plain value is left out. Raises ConfigError for a
    version whose fields are not known.
    """
    minor = minor_version(version)
    if minor not in versions():
        raise ConfigError(f"megatron-core {version}: the fields of {', '.join(versions())} are known only")
    text = files("moeref.config").joinpath("fields", f"{minor}.json").read_text(encoding="utf-8")
    kinds: dict[str, dict[str, Any]] = json.loads(text)
    known = {**kinds["TransformerConfig"], **(kinds["MLATransformerConfig"] if mla else {})}
    name = "MLATransformerConfig" if mla else "TransformerConfig"
    return dataclasses.make_dataclass(name, [_field(*one) for one in known.items()], kw_only=True)


def _field(name: str, known: dict[str, Any]) -> Any:
    kind: Any = {"bool": bool, "int": int, "float": float}.get(known.get("type", ""), Any)
    if choices := known.get("choices"):
        kind = Literal[tuple(choices)]
    if "default" not in known:
        return name, kind
    default = known["default"]
    if isinstance(default, list):
        return name, kind, dataclasses.field(default_factory=lambda: list(default))
    return name, kind, dataclasses.field(default=default)
