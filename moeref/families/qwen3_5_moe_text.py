"""Qwen3.5's text model: Qwen3-Next with experts in every layer, and a gated delta net's linears a tensor each.

A_log and the norm inside a gated delta net stay fp32 in a bf16 model, as in files of Qwen3.5-397B-A17B: a bf16 A_log is
another decay (Megatron-LM#3634, miles#975). Files of 35B-A3B have both in bf16, which becomes fp32 as they are loaded.
Sources: transformers' Qwen3_5MoeGatedDeltaNet and Qwen3_5MoeTopKRouter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families.mapping import HFPattern, ParamMapping
from moeref.families.model import Model
from moeref.families.qwen3_next import MAPPINGS as OF_QWEN3_NEXT
from moeref.families.qwen3_next import read_hybrid
from moeref.families.reading import check_switches, require

NAME = "qwen3_5_moe_text"
_NET = "model.layers.{layer}.linear_attn."
#: Of Megatron's in_proj, one below the other.
_IN_PROJ = (
    HFPattern(_NET + "in_proj_qkv.weight", ("gdn_qkv", "hidden")),
    HFPattern(_NET + "in_proj_z.weight", ("gdn_v", "hidden")),
    HFPattern(_NET + "in_proj_b.weight", ("value_heads", "hidden")),
    HFPattern(_NET + "in_proj_a.weight", ("value_heads", "hidden")),
)


def _of_this(mapping: ParamMapping) -> ParamMapping:
    """A line of Qwen3-Next's table as it is here."""
    if mapping.sharding == "gdn_in_proj":
        return replace(mapping, hf=_IN_PROJ)
    in_fp32 = mapping.megatron.endswith((".A_log", ".out_norm.weight"))
    return replace(mapping, dtype="float32") if in_fp32 else mapping


#: Qwen3-Next's table with other linears before its gated delta nets, without dense layers.
MAPPINGS = tuple(_of_this(mapping) for mapping in OF_QWEN3_NEXT if mapping.where != "dense")


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """The text model's config as a `Model`, with an MTP layer if it says so. Experts' weights are always normalised."""
    check_switches(hf, NAME, {"norm_topk_prob": True, "attn_output_gate": True, "mlp_only_layers": []})
    check_switches(hf, NAME, {"mtp_use_dedicated_embeddings": False})
    width = require(hf, NAME, "moe_intermediate_size")  # no layer is dense
    return read_hybrid({**hf, "intermediate_size": width}, NAME, dtype, "mtp_num_hidden_layers")
