"""Model families: one file each, with a table of parameters and a reader of Hugging Face configs.

`read(config)` gives the `Model` of a Hugging Face config, `mappings(model)` its table in both directions.
"""

from __future__ import annotations

import difflib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moeref.families.catalog import Source, known, published, sources, weights
from moeref.families.mapping import ExpertFormat, HFPattern, ParamMapping, SpecNames
from moeref.families.model import FamilyError, Model, UnmappedModelError
from moeref.families.quantised import file_blocks
from moeref.families.values import WRONG, check_values

__all__ = [
    "ALIASES",
    "FAMILIES",
    "ExpertFormat",
    "FamilyError",
    "HFPattern",
    "Model",
    "ParamMapping",
    "Source",
    "SpecNames",
    "UnmappedModelError",
    "discover",
    "known",
    "mappings",
    "published",
    "read",
    "sources",
    "weights",
]


class Family(NamedTuple):
    """A family's reader and its table, in the order in which the tensors of a layer are exported."""

    read: Callable[[Mapping[str, Any], str], Model]
    mappings: tuple[ParamMapping, ...]
    aliases: tuple[str, ...]  # other `model_type`s with the same config and tensors


def discover() -> dict[str, Family]:
    """The families of this package by `model_type`: its modules that have a table."""
    modules = [import_module(f".{found.name}", __name__) for found in pkgutil.iter_modules(__path__)]
    tables = [module for module in modules if hasattr(module, "MAPPINGS")]
    return {m.NAME: Family(m.read, m.MAPPINGS, getattr(m, "ALIASES", ())) for m in tables}


FAMILIES = discover()
ALIASES = {alias: name for name, family in FAMILIES.items() for alias in family.aliases}


def read(config: Mapping[str, Any] | str | Path, dtype: str | None = None) -> Model:
    """The `Model` of a Hugging Face config: a dictionary, a `config.json`, or a folder with one.

    dtype: overrides the checkpoint's, which is `dtype` or `torch_dtype` in the config, or else bfloat16.
    Raises UnmappedModelError for an unknown `model_type` and for a switch that the family's table does not describe;
    FamilyError, of which that is a subclass, for a missing key and other bad input. `moeref check` exits with 3 for the
    first and with 2 for the second.
    """
    config = loaded(config)
    name = config.get("model_type")
    family = FAMILIES.get(ALIASES.get(str(name), str(name)))
    if family is None:
        spelled = sorted({*FAMILIES, *ALIASES})
        near = difflib.get_close_matches(str(name)[:100], spelled, n=1, cutoff=0.7)
        raise UnmappedModelError(
            f"unknown model_type {name!r}; families are {', '.join(spelled)}"
            + (f" (did you mean {near[0]}?)" if near else "")
        )
    check_values(config, str(name))
    blocks = file_blocks(config, str(name))
    found = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    try:
        model = replace(family.read(config, found.removeprefix("torch.")), **blocks)
        _check(model)
    except FamilyError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A family expects numbers, lists and booleans; a config from outside may have anything.
        raise FamilyError(f"{name}: {WRONG}: {error}") from error
    return model


def loaded(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A Hugging Face config as a dictionary: `config` itself, or what is in a `config.json` or in a folder with one.

    Of a model that is more than its language model the keys of its `text_config` are among its own. Raises FamilyError
    for a path without a config.
    """
    found = config if isinstance(config, Mapping) else _file(Path(config))
    text = found.get("text_config")
    return {**text, **found} if isinstance(text, Mapping) else found


def _file(path: Path) -> Mapping[str, Any]:
    try:
        path = path / "config.json" if path.is_dir() else path
        if path.exists() and not path.is_file():  # a pipe would block the reader for ever
            raise OSError("not a regular file")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise FamilyError(f"cannot read a Hugging Face config from {path}: {why}") from error
    if not isinstance(found, Mapping):
        raise FamilyError(f"{path} holds a JSON {type(found).__name__}, not a config object")
    return found


def _check(model: Model) -> None:
    """Raise FamilyError for what megatron-core computes differently from transformers, or cannot compute."""
    sizes = f"{model.heads} heads, {model.kv_groups} KV groups, top-{model.top_k} of {model.experts} experts"
    if model.heads % model.kv_groups:
        raise FamilyError(f"{model.family}: the KV groups do not divide the heads: {sizes}")
    if model.top_k > model.experts:
        raise FamilyError(f"{model.family}: a token takes more experts than there are: {sizes}")
    if model.tied and model.mtp_layers:
        raise UnmappedModelError(f"{model.family}: tied embeddings with multi-token prediction are not mapped")
    if model.score_function == "sigmoid" and model.top_k == 1:
        raise UnmappedModelError(
            f"{model.family}: {sizes}: megatron-core does not normalise the score of a single expert"
        )
    # transformers ranks groups by their two best experts, megatron-core by their top_k // topk_group best.
    if model.n_group > 1 and (model.experts % model.n_group or model.top_k // model.topk_group != 2):
        raise UnmappedModelError(
            f"{model.family}: {sizes} in {model.topk_group} of {model.n_group} groups: megatron-core ranks groups as "
            f"transformers does only where top_k // topk_group is 2"
        )


def mappings(model: Model) -> tuple[ParamMapping, ...]:
    """The table of `model`'s family. A mapping with an alias also has the tensor of each MTP layer."""
    return tuple(_aliased(mapping, model) for mapping in FAMILIES[model.family].mappings)


def _aliased(mapping: ParamMapping, model: Model) -> ParamMapping:
    alias = mapping.alias
    if alias is None or not model.mtp_layers:
        return mapping
    layers = range(model.num_layers, model.num_layers + model.mtp_layers)
    return replace(mapping, hf=(*mapping.hf, *(HFPattern(alias.name.format(layer=i), alias.dims) for i in layers)))
