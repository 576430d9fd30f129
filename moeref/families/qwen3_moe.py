"""Qwen3-MoE: GQA with qk-norm, no biases, softmax router, every layer MoE unless `mlp_only_layers` says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import common
from moeref.families.model import Model, check_switches, require, rope

NAME = "qwen3_moe"
ROWS = (common.EMBEDDING, *common.ATTENTION, *common.DENSE, *common.ROUTER, *common.EXPERTS, *common.HEAD)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Qwen3-MoE `config.json` as a `Model`."""
    check_switches(hf, NAME, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    layers, experts = require(hf, NAME, "num_hidden_layers"), require(hf, NAME, "num_experts", "num_local_experts")
    heads, hidden = require(hf, NAME, "num_attention_heads"), require(hf, NAME, "hidden_size")
    step, dense = hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    theta, rotary = rope(hf, NAME, 1.0)
    return Model(
        family=NAME,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_groups=require(hf, NAME, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or hidden // heads,
        vocab=require(hf, NAME, "vocab_size"),
        ffn=require(hf, NAME, "intermediate_size"),
        moe_ffn=require(hf, NAME, "moe_intermediate_size"),
        shared_ffn=0,
        experts=experts,
        top_k=require(hf, NAME, "num_experts_per_tok"),
        # transformers: MoE where (layer + 1) % decoder_sparse_step == 0 and the layer is not in mlp_only_layers
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=False,
        qk_norm=True,
        expert_bias=False,
        score_function="softmax",
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        norm_eps=require(hf, NAME, "rms_norm_eps"),
        rope_theta=theta,
        rotary_percent=rotary,
        max_positions=require(hf, NAME, "max_position_embeddings"),
        param_dtype=dtype,
    )
