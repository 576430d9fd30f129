"""The fields of megatron-core's TransformerConfig by version, as data: megatron-core need not be installed.

`fields/<minor version>.json`, a file for each of CORES, has for every field its default if that is a plain value, and
its type or choices if the annotation gives one that can be checked, and `checked` if `__post_init__` may refuse a
config because of it. A test compares each file with the installed version.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib.resources import files
from typing import Any, Literal

from moeref.config.errors import ConfigError
from moeref.dispatcher.setup import CORES, minor_version


@functools.cache
def known_fields(version: str, *, mla: bool = False) -> dict[str, dict[str, Any]]:
    """What is known of each field of that version's TransformerConfig, or of MLATransformerConfig if `mla`.

    Raises ConfigError for a version whose fields are not known.
    """
    minor = minor_version(version)
    if minor not in CORES:
        raise ConfigError(f"megatron-core {version}: the fields of {', '.join(CORES)} are known only")
    text = files("moeref.config").joinpath("fields", f"{minor}.json").read_text(encoding="utf-8")
    kinds: dict[str, dict[str, Any]] = json.loads(text)
    return {**kinds["TransformerConfig"], **(kinds["MLATransformerConfig"] if mla else {})}


@functools.cache
def transformer_config(version: str, *, mla: bool = False) -> type:
    """A dataclass with those fields. It derives and validates nothing.

    Fields whose default is not a plain value are required. Raises ConfigError as `known_fields` does.
    """
    known = known_fields(version, mla=mla)
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
