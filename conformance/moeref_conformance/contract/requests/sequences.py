"""Other tokens and another length of sequences, after which what is kept of the first shows."""

from __future__ import annotations

import torch

from moeref_conformance.contract.api import Cell


def shorter(length: int, cell: Cell) -> int:
    """The most tokens under `length` that CP and TP ranks divide; 0 where a cell is not asked for fewer.

    Packed samples have unequal lengths anyway, blocks of an FP8 recipe take many rows, and more ranks repeat what few
    show.
    """
    if cell.batch == "packed" or cell.precision or cell.layout.world > 4:
        return 0
    unit = cell.layout.tp * (2 * cell.layout.cp if cell.layout.cp > 1 else 1)
    return (length - 1) // unit * unit


def backwards(tokens_BS: torch.Tensor) -> torch.Tensor:
    """Every row from its last token to its first; -1 stays after its end."""
    at_S = torch.arange(tokens_BS.shape[1])
    lengths_B1 = (tokens_BS >= 0).sum(1, keepdim=True)
    return tokens_BS.gather(1, torch.where(at_S < lengths_B1, lengths_B1 - 1 - at_S, at_S))
