"""All-gathers of pieces with unequal first dimensions, which gloo refuses: padded to the largest, then trimmed."""

from __future__ import annotations

from collections.abc import Callable

import torch


def padded(
    pieces: list[torch.Tensor], mine: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, Callable[[], None]]:
    """What to gather instead: outputs, this rank's input, and what to call afterwards to fill `pieces`.

    Even pieces, and pieces that differ in another dimension, which gloo refuses, are returned as they are.
    """
    rows = [piece.shape[0] if piece.dim() else 1 for piece in pieces]
    if len(set(rows)) <= 1 or any(piece.shape[1:] != mine.shape[1:] for piece in pieces):
        return pieces, mine, lambda: None
    largest = mine.new_zeros((max(rows), *mine.shape[1:]))
    largest[: mine.shape[0]] = mine.detach()
    outputs = [torch.empty_like(largest) for _ in rows]

    def trim() -> None:
        with torch.no_grad():
            for piece, output, n in zip(pieces, outputs, rows, strict=True):
                piece.copy_(output[:n])

    return outputs, largest, trim
