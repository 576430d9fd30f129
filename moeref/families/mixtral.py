"""Mixtral: GQA without qk-norm or biases, every layer MoE, softmax over the chosen experts.

Files say `block_sparse_moe` with w1 (gate), w3 (up), w2 (down); in memory transformers 5 says `mlp`, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import common
from moeref.families.model import Model, Tensor
from moeref.families.reading import check_switches, decoder, grouped_query, require

NAME = "mixtral"
_MOE, _FC1, _FC2 = "model.layers.{layer}.block_sparse_moe.", *common.EXPERTS
MAPPINGS = (
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
    base = decoder(hf, NAME, dtype)
    return Model(
        **base,
        **grouped_query(hf, NAME),
        experts=require(hf, NAME, "num_local_experts"),
        moe_ffn=base["ffn"],
        moe_layers=(True,) * base["num_layers"],
        score_function="softmax",
        norm_topk_prob=True,
    )
