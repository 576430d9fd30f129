"""Step of the facet `gradients`: one training step, and what every parameter's gradient is after it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Gradients, Layout


def asked(cell: Cell) -> bool:
    """Whether a cell takes a step: in fp32, where a sum in another order turns no route, and without a further loss."""
    return cell.gradients and cell.dtype == "float32" and cell.mtp == 0


def batch(tokens_BS: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The rows of a step: the kit's, and the same again where interleaving wants more, which leaves their mean alone.

    2·PP microbatches bring an interleaved schedule into its steady state, where sends of both directions cross.
    """
    return tokens_BS.repeat(layout.pp if layout.vpp > 1 else 1, 1)


def step(facet: Gradients, tokens_file: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Gradients by `chunk:local`. Raises TypeError for anything but tensors in fp32 by (chunk, local name)."""
    found = facet.gradients(batch(load_file(tokens_file)["tokens"], layout))
    made: dict[str, torch.Tensor] = {}
    for key, tensor in found.items():
        chunk, local = key
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise TypeError(
                f"gradients(): {local} of chunk {chunk} is {getattr(tensor, 'dtype', type(tensor))}, not fp32"
            )
        made[f"{chunk}:{local}"] = tensor
    return made
