"""Brute force for Qwen3-Next: which rows the fused linears of gated attention and of a gated delta net hold.

Rows are listed one by one, in the order in which megatron-core's modules split them, and taken from where transformers'
modules read them. `placement` uses these tables for names that only this family has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Rest of the local name -> rest of the Hugging Face name, for tensors every TP rank holds whole.
WHOLE = {
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}


@dataclass(frozen=True)
class Heads:
    """Heads of the config and the TP rank that asks."""

    config: Mapping[str, Any]
    tp: int
    size: int

    def mine(self, count: str) -> list[int]:
        """The heads of this rank out of all that the config's `count` tells."""
        total = int(self.config[count])
        return [head for head in range(total) if head * self.size // total == self.tp]


Make = Callable[[Heads, Mapping[str, torch.Tensor]], torch.Tensor]


def _in_proj(heads: Heads, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All queries of this rank's key heads, all keys, all values, all z, then beta and alpha of its value heads."""
    qkvz, ba = given["linear_attn.in_proj_qkvz.weight"], given["linear_attn.in_proj_ba.weight"]
    k, v, per = _delta_sizes(heads.config)
    rows: list[torch.Tensor] = []
    for key_head in heads.mine("linear_num_key_heads"):
        rows.append(qkvz[[key_head * (2 * k + 2 * per * v) + i for i in range(k)]])
    for key_head in heads.mine("linear_num_key_heads"):
        rows.append(qkvz[[key_head * (2 * k + 2 * per * v) + k + i for i in range(k)]])
    for skipped in (2 * k, 2 * k + per * v):  # values, then z
        for value_head in heads.mine("linear_num_value_heads"):
            key_head, nth = divmod(value_head, per)
            rows.append(qkvz[[key_head * (2 * k + 2 * per * v) + skipped + nth * v + i for i in range(v)]])
    for skipped in (0, per):  # beta, then alpha
        for value_head in heads.mine("linear_num_value_heads"):
            key_head, nth = divmod(value_head, per)
            rows.append(ba[[key_head * 2 * per + skipped + nth]])
    return torch.cat(rows)


def _conv1d(heads: Heads, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Channels of this rank's queries, of its keys, of its values; the file has all queries, all keys, all values."""
    full = given["linear_attn.conv1d.weight"]
    k, v, _ = _delta_sizes(heads.config)
    keys = int(heads.config["linear_num_key_heads"]) * k
    rows: list[torch.Tensor] = []
    for before in (0, keys):
        for key_head in heads.mine("linear_num_key_heads"):
            rows.append(full[[before + key_head * k + i for i in range(k)]])
    for value_head in heads.mine("linear_num_value_heads"):
        rows.append(full[[2 * keys + value_head * v + i for i in range(v)]])
    return torch.cat(rows)


def _delta_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels of a key head and of a value head, and the value heads of one key head."""
    per = int(config["linear_num_value_heads"]) // int(config["linear_num_key_heads"])
    return int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"]), per


def _one_a_head(name: str) -> Make:
    def make(heads: Heads, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return given[name][heads.mine("linear_num_value_heads")]

    return make


def _columns_of_value_heads(heads: Heads, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    width = int(heads.config["linear_value_head_dim"])
    mine = heads.mine("linear_num_value_heads")
    return given["linear_attn.out_proj.weight"][:, [head * width + i for head in mine for i in range(width)]]


def _gated_qkv(heads: Heads, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For each KV group: its query heads, the gates of these heads, its key head, its value head.

    In the file a head's query and its gate follow one another.
    """
    q, k, v = (given[f"self_attn.{part}_proj.weight"] for part in "qkv")
    width, count = int(heads.config["head_dim"]), int(heads.config["num_attention_heads"])
    groups = int(heads.config["num_key_value_heads"])
    rows: list[torch.Tensor] = []
    for group in heads.mine("num_key_value_heads"):
        of_group = [head for head in range(count) if head * groups // count == group]
        rows.append(q[[head * 2 * width + i for head in of_group for i in range(width)]])
        rows.append(q[[head * 2 * width + width + i for head in of_group for i in range(width)]])
        rows += [part[[group * width + i for i in range(width)]] for part in (k, v)]
    return torch.cat(rows)


#: Rest of the local name -> (rests of the Hugging Face names, what this TP rank makes of them).
CUT: dict[str, tuple[tuple[str, ...], Make]] = {
    "self_attention.in_proj.weight": (
        ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
        _in_proj,
    ),
    "self_attention.conv1d.weight": (("linear_attn.conv1d.weight",), _conv1d),
    "self_attention.dt_bias": (("linear_attn.dt_bias",), _one_a_head("linear_attn.dt_bias")),
    "self_attention.A_log": (("linear_attn.A_log",), _one_a_head("linear_attn.A_log")),
    "self_attention.out_proj.weight": (("linear_attn.out_proj.weight",), _columns_of_value_heads),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), _gated_qkv),
}
