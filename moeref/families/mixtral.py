"""Mixtral: GQA without qk-norm or biases, every layer MoE, softmax over the chosen experts.

Files say `block_sparse_moe` with w1 (gate), w3 (up), w2 (down); in memory transformers 5 says `mlp`, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import common
from moeref.families.model import Model, Tensor, check_switches, require, rope

NAME = "mixtral"
_MOE, _FC1, _FC2 = "model.layers.{layer}.block_sparse_moe.", *common.EXPERTS
ROWS = (
    common.EMBEDDING,
    *common.ATTENTION,
    common.PRE_MOE_NORM,
    replace(
        common.GATE,
        hf=(Tensor(_MOE + "gate.weight", ("experts", "hidden")),),
        fused=common.GATE.hf[0],
    ),
    replace(
        _FC1, hf=tuple(Tensor(_MOE + f"experts.{{expert}}.{w}.weight", ("moe_ffn", "hidden")) for w in ("w1", "w3"))
    ),
    replace(_FC2, hf=(Tensor(_MOE + "experts.{expert}.w2.weight", ("hidden", "moe_ffn")),)),
    *common.HEAD,
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Mixtral `config.json` as a `Model`."""
    check_switches(
        hf,
        NAME,
        {"hidden_act": "silu", "attention_bias": False, "sliding_window": None, "router_jitter_noise": 0.0},
    )
    layers, ffn = require(hf, NAME, "num_hidden_layers"), require(hf, NAME, "intermediate_size")
    heads, hidden = require(hf, NAME, "num_attention_heads"), require(hf, NAME, "hidden_size")
    theta, rotary = rope(hf, NAME, 1.0)
    return Model(
        family=NAME,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_groups=require(hf, NAME, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or hidden // heads,
        vocab=require(hf, NAME, "vocab_size"),
        ffn=ffn,
        moe_ffn=ffn,
        shared_ffn=0,
        experts=require(hf, NAME, "num_local_experts"),
        top_k=require(hf, NAME, "num_experts_per_tok"),
        moe_layers=(True,) * layers,
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=False,
        qk_norm=False,
        expert_bias=False,
        score_function="softmax",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        norm_eps=require(hf, NAME, "rms_norm_eps"),
        rope_theta=theta,
        rotary_percent=rotary,
        max_positions=require(hf, NAME, "max_position_embeddings"),
        param_dtype=dtype,
    )
