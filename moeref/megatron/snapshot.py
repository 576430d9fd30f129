"""Weights kept beside a model's own, as those of a reference policy are, and put in their place for a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def tensors_of(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers, each once; a tied head is its embedding."""
    return [tensor for chunk in chunks for of in (chunk.parameters, chunk.buffers) for tensor in of()]


class Snapshot:
    """What the parameters and buffers of `chunks` hold now, in memory of the CPU.

    Buffers are among them: the experts' bias decides routes, and a step may update it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._held = [tensor.detach().to("cpu", copy=True) for tensor in tensors_of(chunks)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the `with` block the model holds these weights, and afterwards its own again, bit for bit.

        For forwards without gradients: an optimizer's fp32 master weights stay those of the model's own.
        """
        own = [tensor.detach().clone() for tensor in tensors_of(self._chunks)]
        try:
            self._put(self._held)
            yield
        finally:
            self._put(own)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(tensors_of(self._chunks), values, strict=True):
            tensor.data.copy_(value)
