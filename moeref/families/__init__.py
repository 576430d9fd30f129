"""Model families: one short data file each. Adding a family is adding a file and naming it here.

`read(config)` gives the `Model` of a Hugging Face config; `rows(model)` its two-way HF ↔ Megatron table.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moeref.families import glm4_moe, qwen3_moe
from moeref.families.model import FamilyError, Model, Row, Spelling, Tensor

__all__ = ["FAMILIES", "FamilyError", "Model", "Row", "Spelling", "Tensor", "read", "rows"]


class Family(NamedTuple):
    """A family's reader and its table in the order in which tensors are exported within a layer."""

    read: Callable[[Mapping[str, Any], str], Model]
    rows: tuple[Row, ...]


FAMILIES: dict[str, Family] = {m.NAME: Family(m.read, m.ROWS) for m in (glm4_moe, qwen3_moe)}


def read(config: Mapping[str, Any] | str | Path, dtype: str | None = None) -> Model:
    """The `Model` of a Hugging Face config: a dictionary, a `config.json`, or the folder that holds one.

    dtype overrides the checkpoint's (`dtype` or `torch_dtype` in the config; bfloat16 where neither is given).
    Raises FamilyError for an unknown `model_type`, a missing key, or a switch the family's table does not describe.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise FamilyError(f"cannot read a Hugging Face config from {path}: {error}") from error
        if not isinstance(config, Mapping):
            raise FamilyError(f"{path} holds a JSON {type(config).__name__}, not a config object")
    name = config.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        near = difflib.get_close_matches(str(name), FAMILIES, n=1, cutoff=0.7)
        raise FamilyError(
            f"unknown model_type {name!r}; families are {', '.join(sorted(FAMILIES))}"
            + (f" (did you mean {near[0]}?)" if near else "")
        )
    found = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    model = family.read(config, found.removeprefix("torch."))
    if model.heads % model.kv_groups or model.top_k > model.experts:
        raise FamilyError(
            f"{name}: {model.heads} heads, {model.kv_groups} KV groups, top-{model.top_k} of {model.experts} experts"
        )
    return model


def rows(model: Model) -> tuple[Row, ...]:
    """The table of `model`'s family."""
    return FAMILIES[model.family].rows
