"""Published models by name: the keys of `config.json` that their family reads, and where they come from.

Each is `published/<name>.json`; `published/sources.toml` names the Hugging Face repository and what the numbers were
checked against. The configs describe bf16 weights: where the files of a repository are quantised, `sources.toml` says
so and `quantization_config` is left out.
"""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from moeref.families.model import FamilyError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the sizes of a published model come from."""

    repository: str  # on the Hugging Face hub
    released: str  # year and month
    weights: str  # as published: "bf16", "fp8", "int4" or "mxfp4"
    checked: tuple[str, ...]  # what the config was checked against
    same: tuple[str, ...] = ()  # repositories with the same config
    variants: Mapping[str, Mapping[str, Any]]  # repositories of the same shapes -> keys that differ


def _folder() -> Traversable:
    return files("moeref.families").joinpath("published")


@functools.cache
def sources() -> dict[str, Source]:
    """Name -> `Source` of every published model, in the order of their names."""
    found = tomllib.loads(_folder().joinpath("sources.toml").read_text(encoding="utf-8"))
    return {name: _source(found[name]) for name in sorted(found)}


def _source(values: dict[str, Any]) -> Source:
    lists = {name: tuple(values.get(name, ())) for name in ("checked", "same")}
    return Source(**{"variants": {}, **values, **lists})


def published() -> tuple[str, ...]:
    """Names of all published models, such as `qwen3-30b-a3b`."""
    return tuple(sources())


@functools.cache
def _spellings() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Every spelling of a published model in lower case -> its name here, and the keys that differ."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name, source in sources().items():
        spellings = {**{key: {} for key in (name, source.repository, *source.same)}, **source.variants}
        for spelled, keys in spellings.items():
            found |= dict.fromkeys((spelled.lower(), spelled.lower().rpartition("/")[2]), (name, keys))
    return found


def weights(name: str) -> str:
    """How the repository of a published model has its weights, such as `mxfp4`; "" for another name or spelling."""
    for spelled, source in sources().items():
        if name.lower() in (spelled, source.repository.lower(), source.repository.lower().rpartition("/")[2]):
            return source.weights
    return ""


def known(name: str) -> dict[str, Any]:
    """The Hugging Face config of a published model, for `families.read`.

    name: as in `published`, or a repository with or without its owner, variants too; case does not matter. FamilyError
    names the nearest known one.
    """
    found = _spellings().get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower()[:100], sources(), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FamilyError(
            f"unknown model {name!r}{hint}; give a config.json or its folder, or one of the MoE models known by name: "
            f"{', '.join(sources())}"
        )
    base, keys = found
    return {**json.loads(_folder().joinpath(f"{base}.json").read_text(encoding="utf-8")), **keys}
