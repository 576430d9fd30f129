"""Reading Hugging Face configs: required keys, switches with only one supported value, keys that families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.model import FamilyError, UnmappedModelError


def require(hf: Mapping[str, Any], family: str, *names: str, default: Any = None) -> Any:
    """The value of the first of `names` that `hf` has, or `default`. Raises FamilyError without either."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    if default is None:
        raise FamilyError(f"{family}: config.json has no {' or '.join(names)}; is it the text model's own config?")
    return default


def scaled_rope_types(hf: Mapping[str, Any]) -> list[str]:
    """The rope types that a config names besides 'default'."""
    given = (hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {})
    return sorted({str(d.get("rope_type", d.get("type", "default"))) for d in given} - {"default"})


def rope(hf: Mapping[str, Any], family: str, partial: float) -> tuple[float, float]:
    """(theta, rotary percent) from `rope_parameters` (transformers 5) or the older top-level keys.

    Raises UnmappedModelError for a scaled rope.
    """
    inner = hf.get("rope_parameters") or {}
    if kinds := scaled_rope_types(hf):
        raise UnmappedModelError(f"{family}: rope type {kinds} is not mapped; only 'default' is")
    theta = float(inner.get("rope_theta") or require(hf, family, "rope_theta"))
    return theta, float(inner.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or partial)


def check_switches(hf: Mapping[str, Any], family: str, expected: Mapping[str, Any]) -> None:
    """Raise UnmappedModelError for a switch that has another value than the table describes."""
    for name, value in expected.items():
        if name in hf and hf[name] is not None and hf[name] != value:
            raise UnmappedModelError(
                f"{family}: {name}={hf[name]!r} is not mapped (only {value!r} is); add it to the family"
            )


def decoder(hf: Mapping[str, Any], family: str, dtype: str) -> dict[str, Any]:
    """The fields of `Model` under the names that every decoder's config has."""
    return {
        "family": family,
        "num_layers": require(hf, family, "num_hidden_layers"),
        "hidden": require(hf, family, "hidden_size"),
        "heads": require(hf, family, "num_attention_heads"),
        "vocab": require(hf, family, "vocab_size"),
        "ffn": require(hf, family, "intermediate_size"),
        "top_k": require(hf, family, "num_experts_per_tok"),
        "tied": bool(hf.get("tie_word_embeddings", False)),
        "norm_eps": require(hf, family, "rms_norm_eps"),
        "max_positions": require(hf, family, "max_position_embeddings"),
        "param_dtype": dtype,
    }


def grouped_query(hf: Mapping[str, Any], family: str, partial_rotary: float = 1.0) -> dict[str, Any]:
    """The fields of grouped-query attention with plain rope; `partial_rotary` is the default of its factor."""
    theta, rotary = rope(hf, family, partial_rotary)
    return {**grouped_heads(hf, family), "rope_theta": theta, "rotary_percent": rotary}


def grouped_heads(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of grouped-query attention without its rope."""
    head_dim = hf.get("head_dim") or require(hf, family, "hidden_size") // require(hf, family, "num_attention_heads")
    return {"kv_groups": require(hf, family, "num_key_value_heads"), "head_dim": head_dim}


def sigmoid_experts(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of experts as in DeepSeek-V3 and GLM: shared experts, a sigmoid router with a bias, MTP."""
    moe_ffn = require(hf, family, "moe_intermediate_size")
    return {
        "moe_ffn": moe_ffn,
        "shared_ffn": moe_ffn * int(hf.get("n_shared_experts") or 0),
        "experts": require(hf, family, "n_routed_experts", "num_local_experts"),
        "expert_bias": True,
        "score_function": "sigmoid",
        "fp32_router": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
        "n_group": int(hf.get("n_group") or 1),
        "topk_group": int(hf.get("topk_group") or 1),
        "mtp_layers": int(hf.get("num_nextn_predict_layers") or 0),
    }
