"""Reading configs with DeepSeek-V3's keys: multi-latent attention and a sigmoid router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.model import MLA, FamilyError, Model
from moeref.families.reading import check_switches, decoder, require, sigmoid_experts
from moeref.families.yarn import read_rope

_SWITCHES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def listed_layers(hf: Mapping[str, Any], name: str, prefix: int) -> tuple[bool, ...]:
    """Whether each layer has experts, from `mlp_layer_types`; without it, all but the first `prefix` have."""
    layers = require(hf, name, "num_hidden_layers")
    kinds = hf.get("mlp_layer_types") or ["dense" if i < prefix else "sparse" for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise FamilyError(f"{name}: mlp_layer_types must say dense or sparse for each of {layers} layers, not {kinds}")
    return tuple(kind == "sparse" for kind in kinds)


def read_mla(hf: Mapping[str, Any], name: str, dtype: str, moe_layers: tuple[bool, ...]) -> Model:
    """A config with DeepSeek-V3's keys as a `Model`.

    The latent norms use `rms_norm_eps` in megatron-core and in inference engines, and always 1e-6 in transformers. That
    is the same for DeepSeek-V3, but not for GLM-4.7-Flash (1e-5).
    """
    check_switches(hf, name, {**_SWITCHES, "num_key_value_heads": require(hf, name, "num_attention_heads")})
    base = decoder(hf, name, dtype)
    theta, yarn = read_rope(hf, name)
    mla = MLA(
        q_rank=hf.get("q_lora_rank") or 0,
        kv_rank=require(hf, name, "kv_lora_rank"),
        nope=require(hf, name, "qk_nope_head_dim"),
        rope=require(hf, name, "qk_rope_head_dim"),
        v=require(hf, name, "v_head_dim"),
        yarn=yarn,
    )
    return Model(
        **base,
        **sigmoid_experts(hf, name),
        kv_groups=base["heads"],
        head_dim=mla.v,
        qk_norm=True,
        rope_theta=theta,
        moe_layers=moe_layers,
        mla=mla,
    )
