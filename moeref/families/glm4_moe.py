"""GLM-4.5: GQA with QKV bias and optional qk-norm, a dense prefix, shared experts, sigmoid router with an fp32 bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import common
from moeref.families.model import Model, check_switches, require, rope

NAME = "glm4_moe"
ROWS = (
    common.EMBEDDING,
    *common.ATTENTION,
    *common.DENSE,
    *common.ROUTER,
    *common.SHARED,
    *common.EXPERTS,
    *common.MTP,
    *common.HEAD,
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A GLM-4.5 `config.json` as a `Model`."""
    check_switches(hf, NAME, {"hidden_act": "silu", "norm_topk_prob": True})
    layers, prefix = require(hf, NAME, "num_hidden_layers"), require(hf, NAME, "first_k_dense_replace", default=1)
    heads, hidden = require(hf, NAME, "num_attention_heads"), require(hf, NAME, "hidden_size")
    moe_ffn = require(hf, NAME, "moe_intermediate_size")
    theta, rotary = rope(hf, NAME, 0.5)
    return Model(
        family=NAME,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_groups=require(hf, NAME, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or hidden // heads,
        vocab=require(hf, NAME, "vocab_size"),
        ffn=require(hf, NAME, "intermediate_size"),
        moe_ffn=moe_ffn,
        shared_ffn=moe_ffn * int(hf.get("n_shared_experts") or 0),
        experts=require(hf, NAME, "n_routed_experts", "num_local_experts"),
        top_k=require(hf, NAME, "num_experts_per_tok"),
        moe_layers=tuple(i >= prefix for i in range(layers)),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        expert_bias=True,
        score_function="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=float(hf.get("routed_scaling_factor", 1.0)),
        n_group=int(hf.get("n_group") or 1),
        topk_group=int(hf.get("topk_group") or 1),
        norm_eps=require(hf, NAME, "rms_norm_eps"),
        rope_theta=theta,
        rotary_percent=rotary,
        max_positions=require(hf, NAME, "max_position_embeddings"),
        param_dtype=dtype,
        mtp_layers=int(hf.get("num_nextn_predict_layers") or 0),
    )
