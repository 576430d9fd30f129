"""Training steps whose backward pass recomputes what the forward pass computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from moeref_conformance.contract.api import Cell
from moeref_conformance.steps.observed_routes import moe_layers


def recomputing(cell: Cell) -> Callable[[Sequence[torch.nn.Module]], AbstractContextManager[None]]:
    """How a cell's steps recompute forwards: whole layers, or where microbatches have two rows their experts alone.

    Those of MTP are passed their packs, which megatron-core 0.16.1 cannot recompute.
    """
    alone = cell.batch == "pairs" or (cell.batch == "packed" and cell.mtp)
    return experts_recomputed if alone else full_recompute


@contextmanager
def full_recompute(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Recompute every layer's forward in the backward pass. All chunks share one config."""
    config: Any = chunks[0].config
    asked = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    before = {name: getattr(config, name) for name in asked}
    vars(config).update(asked)
    try:
        yield
    finally:
        vars(config).update(before)


@contextmanager
def experts_recomputed(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Recompute the forward of MoE layers alone in the backward pass: Megatron's selective recomputation of `moe`."""
    config: Any = chunks[0].config
    layers = [layer for chunk in chunks for _, layer in moe_layers(chunk)]
    asked = [(config, "recompute_granularity", "selective"), (config, "recompute_modules", ["moe"])]
    with ExitStack() as stack:
        for owner, name, value in [*asked, *((layer, "moe_layer_recompute", True) for layer in layers)]:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
