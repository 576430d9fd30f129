"""Brute force for gpt-oss: biases, and the experts of a layer in one tensor.

`gate_up_proj[e]` is [hidden, 2·width] with gate in columns 0, 2, 4 … and up in 1, 3, 5 …; `down_proj[e]` is
[width, hidden]. Megatron's fc1 of an expert is [all gate rows of the rank; all its up rows] of `hidden` columns, its
fc2 is [hidden, width of the rank]. The bias of fc1 goes with its rows, the bias of fc2 is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Rest of the local name -> rest of the Hugging Face name, for tensors every TP rank holds whole.
WHOLE = {
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}


def _mine(width: int, rank: int, size: int) -> list[int]:
    return [j for j in range(width) if j * size // width == rank]


def _fc1(full: torch.Tensor, expert: int, rank: int, size: int) -> torch.Tensor:
    mine = _mine(full.shape[-1] // 2, rank, size)
    columns = [2 * j for j in mine] + [2 * j + 1 for j in mine]
    return full[expert][..., columns].movedim(-1, 0).contiguous()


def _fc2_weight(full: torch.Tensor, expert: int, rank: int, size: int) -> torch.Tensor:
    return full[expert][_mine(full.shape[1], rank, size)].T.contiguous()


def _fc2_bias(full: torch.Tensor, expert: int, rank: int, size: int) -> torch.Tensor:
    return full[expert]


Make = Callable[[torch.Tensor, int, int, int], torch.Tensor]
#: (linear, parameter) of an expert -> rest of the Hugging Face name, and what an ETP rank holds of it:
#: (all experts' tensor, expert, rank, number of ranks) -> tensor.
EXPERT: dict[tuple[str, str], tuple[str, Make]] = {
    ("linear_fc1", "weight"): ("mlp.experts.gate_up_proj", _fc1),
    ("linear_fc1", "bias"): ("mlp.experts.gate_up_proj_bias", _fc1),
    ("linear_fc2", "weight"): ("mlp.experts.down_proj", _fc2_weight),
    ("linear_fc2", "bias"): ("mlp.experts.down_proj_bias", _fc2_bias),
}
