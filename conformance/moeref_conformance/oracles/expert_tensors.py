"""Experts of a layer as files have them: one tensor of all, [experts, rows, columns], or the linears of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]
#: Linears of an expert in a tensor that holds those of all, one above the other.
LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Split each tensor that holds all experts into their linears, under the names that per-expert files have."""
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        experts, _, held = name.rpartition(".")
        if not experts.endswith(".mlp.experts"):
            found[name] = tensor
            continue
        for expert, rows in enumerate(tensor):
            linears = rows.chunk(len(LINEARS[held]))
            found |= {f"{experts}.{expert}.{of}.weight": w for of, w in zip(LINEARS[held], linears, strict=True)}
    return found


def joined(tensors: Tensors, like: Tensors) -> dict[str, torch.Tensor]:
    """Join what `split` has split, into tensors with the names and shapes of those in `like`."""
    return {name: tensors[name] if name in tensors else _stacked(tensors, name, len(of)) for name, of in like.items()}


def _stacked(tensors: Tensors, name: str, experts: int) -> torch.Tensor:
    within, _, held = name.rpartition(".")
    return torch.stack(
        [torch.cat([tensors[f"{within}.{number}.{of}.weight"] for of in LINEARS[held]]) for number in range(experts)]
    )
