"""GLM-4.5: GQA with QKV bias and optional qk-norm, a dense prefix, shared experts, sigmoid router with an fp32 bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import common
from moeref.families.model import Model
from moeref.families.reading import check_switches, decoder, grouped_query, require, sigmoid_experts

NAME = "glm4_moe"
MAPPINGS = (
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
    base, prefix = decoder(hf, NAME, dtype), require(hf, NAME, "first_k_dense_replace", default=1)
    return Model(
        **base,
        **grouped_query(hf, NAME, partial_rotary=0.5),
        **sigmoid_experts(hf, NAME),
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        moe_layers=tuple(i >= prefix for i in range(base["num_layers"])),
    )
