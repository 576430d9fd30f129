"""Tables: the Hugging Face tensors that each local tensor is made of, and which of their elements a rank holds.

Written to be slow and obvious: rows are picked one by one. Names are without the layer's prefix. `{}` stands for an
expert's number; an expert's tensor without it is part of a tensor that holds all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Share:
    """The rank among the `size` TP (or ETP) ranks that cut a tensor, and the shape of what the rank holds."""

    config: Mapping[str, Any]
    rank: int
    size: int
    shape: tuple[int, ...]

    def mine(self, count: int) -> list[int]:
        """Those of `count` rows, columns or heads that are this rank's: equally many for each rank, in order."""
        return [i for i in range(count) if i * self.size // count == self.rank]

    def rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's run of rows; where rows are heads one after the other, the rows of its heads."""
        return full[self.mine(len(full))]

    def columns(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's run of columns."""
        return full[:, self.mine(full.shape[1])]


#: The full Hugging Face tensors -> what the rank holds of them.
Make = Callable[..., torch.Tensor]
#: Local name -> Hugging Face names, and what is made of them.
Table = dict[str, tuple[tuple[str, ...], Make]]


def whole(share: Share, full: torch.Tensor) -> torch.Tensor:
    """Every rank holds all of it."""
    return full


def _of_heads(share: Share, full: torch.Tensor) -> torch.Tensor:
    """A norm of queries or keys: the same for each head, or one over all heads, of which a rank may hold its heads'."""
    width = share.config.get("head_dim") or len(full)
    heads = len(full) // width
    first, number = share.rank * heads // share.size, max(heads // share.size, 1)
    held = full[first * width : (first + number) * width]
    return held if share.shape == tuple(held.shape) else full


def gate_up(share: Share, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The rank's chunk of gate, then its chunk of up."""
    return torch.cat([share.rows(gate), share.rows(up)])


def _fused_gate_up(share: Share, both: torch.Tensor) -> torch.Tensor:
    return gate_up(share, *both.chunk(2))


def block(full: torch.Tensor, number: int, rows: int) -> torch.Tensor:
    """Rows number·rows … number·rows + rows − 1, such as those of one head."""
    return full[[number * rows + i for i in range(rows)]]


def _qkv(share: Share, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This rank's run of rows of: for each KV group its query heads, then its key head, then its value head.

    A run is whole groups, or with fewer groups than ranks a part of one, whatever heads it begins and ends in.
    """
    heads, groups = int(share.config["num_attention_heads"]), int(share.config["num_key_value_heads"])
    width, parts = len(q) // heads, list[torch.Tensor]()
    for group in range(groups):
        parts += [block(q, head, width) for head in range(heads) if head * groups // heads == group]
        parts += [block(k, group, width), block(v, group, width)]
    return share.rows(torch.cat(parts))


def each(make: Make, *names: tuple[str, str]) -> Table:
    """A table of local tensors made of one Hugging Face tensor each."""
    return {local: ((hf,), make) for local, hf in names}


def mlp(local: str, hf: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Table:
    """Both linears of a dense MLP, of shared experts or of an expert."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    return {
        f"{local}linear_fc1.weight": ((gate, up), gate_up),
        f"{local}linear_fc2.weight": ((down,), Share.columns),
    }


#: The ends of names of routers, of all families.
ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")

#: Every family's.
LAYER = (
    each(
        whole,
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        ("mlp.router.weight", "mlp.gate.weight"),
        ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    )
    | each(Share.columns, ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"))
    | mlp("mlp.", "mlp.")
    | mlp("mlp.shared_experts.", "mlp.shared_experts.")
)
ATTENTION = each(
    whole,
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    # Attention of their own, in which frameworks have norms over all heads
    ("self_attention.q_norm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_norm.weight", "self_attn.k_norm.weight"),
) | each(
    _of_heads,
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
ATTENTION |= {
    f"self_attention.linear_qkv.{kind}": (tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), _qkv)
    for kind in ("weight", "bias")
}
#: Multi-latent attention, where q_layernorm means something else.
LATENT = each(
    whole,
    ("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    ("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    ("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
) | each(
    Share.rows,
    ("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    ("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    ("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
)
#: The indexer of sparse attention.
INDEXER = each(
    whole,
    *(
        (f"self_attention.core_attention.indexer.{local}", f"self_attn.indexer.{hf}")
        for local, hf in {
            "linear_wq_b.weight": "wq_b.weight",
            "linear_wk.weight": "wk.weight",
            "k_norm.weight": "k_norm.weight",
            "k_norm.bias": "k_norm.bias",
            "linear_weights_proj.weight": "weights_proj.weight",
        }.items()
    ),
)


def is_trained(hf_name: str) -> bool:
    """Whether gradients reach a Hugging Face tensor: they do not reach an indexer, of which only the order counts."""
    return ".self_attn.indexer." not in hf_name


#: Around the transformer layer of a multi-token prediction layer.
AROUND_MTP = each(
    whole,
    ("enorm.weight", "enorm.weight"),
    ("hnorm.weight", "hnorm.weight"),
    ("final_layernorm.weight", "shared_head.norm.weight"),
) | each(Share.rows, ("eh_proj.weight", "eh_proj.weight"))
EXPERT = mlp("", "mlp.experts.{}.")
FUSED_EXPERT = each(_fused_gate_up, ("linear_fc1.weight", "mlp.experts.gate_up_proj")) | each(
    Share.columns, ("linear_fc2.weight", "mlp.experts.down_proj")
)
MIXTRAL = each(
    whole,
    ("mlp.router.weight", "block_sparse_moe.gate.weight"),
    ("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
)
#: In transformers' memory, where MiniMax-M2's bias is not the router's.
OUTER_BIAS = each(whole, ("mlp.router.expert_bias", "mlp.e_score_correction_bias"))
MIXTRAL_EXPERT = mlp("", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2"))
