"""Gradients of whole Hugging Face tensors, from the one-rank run's. The shards of any layout can be cut from them.

Every element of the checkpoint gets a number. Placing the numbers as if they were the one rank's weights says which
element each of its gradients belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.placement import Placement


def full_gradients(cell: Cell, expected: Expected, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients in fp64 by Hugging Face name; NaN where the one-rank run has none. `local` is keyed `chunk:name`."""
    numbers: dict[str, torch.Tensor] = {}
    count = 0
    for name, tensor in expected.tensors.items():
        numbers[name] = torch.arange(count, count + tensor.numel()).reshape(tensor.shape)
        count += tensor.numel()
    placed = Placement(replace(cell, layout_name="one", layout=Layout()), expected.config, numbers)
    flat = torch.full((count,), torch.nan, dtype=torch.float64)
    for key, gradient in local.items():
        chunk, _, name = key.partition(":")
        held = placed.shard(0, int(chunk), name, list(gradient.shape))
        flat[held.tensor[: held.rows].flatten()] = gradient[: held.rows].double().flatten()
    return {name: flat[where] for name, where in numbers.items()}
