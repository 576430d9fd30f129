"""Qwen3-MoE: GQA with qk-norm, no biases, softmax router, every layer MoE unless `mlp_only_layers` says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import common
from moeref.families.model import Model
from moeref.families.reading import check_switches, decoder, grouped_query, require

NAME = "qwen3_moe"
MAPPINGS = (common.EMBEDDING, *common.ATTENTION, *common.DENSE, *common.ROUTER, *common.EXPERTS, *common.HEAD)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Qwen3-MoE `config.json` as a `Model`."""
    check_switches(hf, NAME, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    base = decoder(hf, NAME, dtype)
    step, dense = hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    return Model(
        **base,
        **grouped_query(hf, NAME),
        qk_norm=True,
        # Published configs say num_experts, transformers 5 saves num_local_experts.
        experts=require(hf, NAME, "num_experts", "num_local_experts"),
        moe_ffn=require(hf, NAME, "moe_intermediate_size"),
        # transformers: MoE where (layer + 1) % decoder_sparse_step == 0 and the layer is not in mlp_only_layers
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(base["num_layers"])),
        score_function="softmax",
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
    )
