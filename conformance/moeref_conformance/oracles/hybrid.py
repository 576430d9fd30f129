"""Tables for Qwen3-Next and Qwen3.5: which rows the fused linears of gated attention and of a gated delta net hold.

Rows are listed one by one, in the order in which megatron-core's modules split them, and taken from where transformers'
modules read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from moeref_conformance.oracles.shares import Share, Table, block, each, mlp, whole


def _sections(full: torch.Tensor, heads: Sequence[int], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """The rows of these heads section by section; in the file all sections of a head follow one another."""
    for number, size in enumerate(sizes):
        for head in heads:
            start = head * sum(sizes) + sum(sizes[:number])
            yield full[[start + i for i in range(size)]]


def _delta_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels of a key head and of a value head, and the value heads of one key head."""
    per = int(config["linear_num_value_heads"]) // int(config["linear_num_key_heads"])
    return int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"]), per


def _in_proj(share: Share, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
    """All queries of this rank's key heads, all keys, all values, all z, then beta and alpha of its value heads."""
    k, v, per = _delta_sizes(share.config)
    heads = share.mine(int(share.config["linear_num_key_heads"]))
    return torch.cat([*_sections(qkvz, heads, (k, k, per * v, per * v)), *_sections(ba, heads, (per, per))])


def _in_projs(share: Share, qkv: torch.Tensor, z: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The same of a file with all queries, then all keys, then all values, and a tensor each of z, beta and alpha."""
    return torch.cat([_conv1d(share, qkv), share.rows(z), share.rows(b), share.rows(a)])


def _conv1d(share: Share, full: torch.Tensor) -> torch.Tensor:
    """Channels of this rank's queries, of its keys, of its values; the file has all queries, all keys, all values."""
    keys = int(share.config["linear_num_key_heads"]) * int(share.config["linear_key_head_dim"])
    return torch.cat([share.rows(part) for part in torch.split(full, [keys, keys, len(full) - 2 * keys])])


def _gated_qkv(share: Share, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This rank's run of rows of: for each KV group its query heads, their gates, its key head, its value head.

    In the file a head's query and its gate follow one another.
    """
    heads, groups = int(share.config["num_attention_heads"]), int(share.config["num_key_value_heads"])
    width, rows = int(share.config["head_dim"]), list[torch.Tensor]()
    for group in range(groups):
        of_group = [head for head in range(heads) if head * groups // heads == group]
        rows += [*_sections(q, of_group, (width, width)), block(k, group, width), block(v, group, width)]
    return share.rows(torch.cat(rows))


LAYER = (
    each(
        whole,
        ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.out_norm.weight", "linear_attn.norm.weight"),
        ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    )
    | each(
        Share.rows,
        ("self_attention.dt_bias", "linear_attn.dt_bias"),
        ("self_attention.A_log", "linear_attn.A_log"),
    )
    | each(Share.columns, ("self_attention.out_proj.weight", "linear_attn.out_proj.weight"))
    | each(_conv1d, ("self_attention.conv1d.weight", "linear_attn.conv1d.weight"))
    | mlp("mlp.shared_experts.", "mlp.shared_expert.")
    | {
        "self_attention.in_proj.weight": (tuple(f"linear_attn.in_proj_{x}.weight" for x in ("qkvz", "ba")), _in_proj),
        "self_attention.linear_qkv.weight": (tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), _gated_qkv),
    }
)
#: Where a gated delta net's linears are four.
SEPARATE: Table = {
    "self_attention.in_proj.weight": (
        tuple(f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")),
        _in_projs,
    )
}
