"""Records which hidden states enter each MoE layer, and which of them its local experts receive.

Routers and replay buffers are not read. Judges match rows by their bytes, whatever dispatcher or rank they came by.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def observed(chunks: Sequence[torch.nn.Module], into: dict[str, torch.Tensor], phase: str) -> Iterator[None]:
    """Record under `phase.layer.call.{in,sent,count,weighed}`: rows [T, H] that enter the decoder's MoE layer of that
    global number, rows [N, H] that its local experts receive, how many of these each local expert has, and where
    experts are given them the weights [N] of rows."""
    handles = []
    for chunk in chunks:
        for name, layer in moe_layers(chunk):
            if "mtp" not in name.split("."):
                handles += _observe(layer, into, phase)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def moe_layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The MoE layers of a chunk by name."""
    for name, module in chunk.named_modules():
        if hasattr(module, "experts") and hasattr(module, "router"):
            yield name, module


def _observe(module: Any, into: dict[str, torch.Tensor], phase: str) -> list[Any]:
    layer, entered, received = int(module.layer_number) - 1, itertools.count(), itertools.count()

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1, tensor.shape[-1]).cpu().clone()

    def enter(_: Any, args: tuple[Any, ...]) -> None:
        into[f"{phase}.{layer}.{next(entered)}.in"] = rows(args[0])

    def receive(_: Any, args: tuple[Any, ...]) -> None:
        key = f"{phase}.{layer}.{next(received)}"
        into[f"{key}.sent"] = rows(args[0])
        into[f"{key}.count"] = torch.as_tensor(args[1]).detach().cpu().to(torch.int64).clone()
        if len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].numel() == len(into[f"{key}.sent"]):
            into[f"{key}.weighed"] = args[2].detach().flatten().cpu().clone()

    return [module.register_forward_pre_hook(enter), module.experts.register_forward_pre_hook(receive)]
