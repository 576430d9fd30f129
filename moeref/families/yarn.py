"""Reading rope, plain or scaled by YaRN, from transformers 5's `rope_parameters` or the older `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from moeref.families import reading
from moeref.families.model import UnmappedModelError, Yarn
from moeref.families.reading import grouped_heads, require, scaled_rope_types

KEYS = frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})

#: Those of grouped-query attention, whose cos and sin are scaled by m(factor) alone, or by `attention_factor`.
GROUPED = KEYS - {"mscale", "mscale_all_dim"} | {"truncate", "attention_factor"}


def grouped_query_with_yarn(hf: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of grouped-query attention with plain rope or YaRN. Raises FamilyError as `read_rope` does."""
    if not scaled_rope_types(hf):
        return reading.grouped_query(hf, name)
    theta, yarn = read_rope(hf, name, GROUPED)
    return {**grouped_heads(hf, name), "rope_theta": theta, "yarn": yarn}


def read_rope(hf: Mapping[str, Any], name: str, keys: Collection[str] = KEYS) -> tuple[float, Yarn | None]:
    """(theta, YaRN or None). `keys` are the keys of YaRN that megatron-core supports for this family.

    Raises FamilyError for another rope type, another key, or a partial rope.
    """
    given = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = given.pop("rope_type", given.pop("type", "default"))
    theta = float(given.pop("rope_theta", None) or require(hf, name, "rope_theta"))
    if float(given.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnmappedModelError(f"{name}: a partial_rotary_factor other than 1 is not mapped")
    unknown = given.keys() - (set(keys) if kind == "yarn" else set())
    if kind not in ("default", "yarn") or unknown:
        raise UnmappedModelError(
            f"{name}: rope type {kind!r} with {sorted(unknown)} is not mapped; 'default' and 'yarn' are"
        )
    if kind == "default":
        return theta, None
    # transformers and megatron-core scale cos and sin by m(mscale) / m(mscale_all_dim) where both are given. Where
    # mscale_all_dim is not, transformers ignores mscale too.
    all_dim = float(given.get("mscale_all_dim") or 0.0)
    if all_dim and not given.get("mscale"):
        raise UnmappedModelError(f"{name}: YaRN with mscale_all_dim but without mscale is not mapped")
    factor = float(require(given, f"{name} (YaRN)", "factor"))
    asked = given.get("attention_factor")
    return theta, Yarn(
        factor=factor,
        original_positions=int(require(given, f"{name} (YaRN)", "original_max_position_embeddings")),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        mscale=float(given["mscale"]) if all_dim else 1.0 if asked is None else _mscale(float(asked), factor, name),
        mscale_all_dim=all_dim,
        truncate=bool(given.get("truncate", True)),
    )


def _mscale(asked: float, factor: float, name: str) -> float:
    """The mscale with which megatron-core scales cos and sin by `asked`: m is 0.1 · mscale · ln(factor) + 1."""
    if factor <= 1 and asked != 1:
        raise UnmappedModelError(f"{name}: YaRN with attention_factor={asked} and a factor of {factor} is not mapped")
    return (asked - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0
