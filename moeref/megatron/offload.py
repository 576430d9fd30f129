"""Tensors whose values are in memory of the CPU while others have that of the GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Offloaded:
    """Values of `tensors` in host memory, pinned where they come from a GPU.

    Until `back` is called each tensor is empty, on its device: its hooks stay, and whatever reads it raises an error.
    Tensors keep their identity, not their address.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._held = [_on_host(of) for of in self._tensors]
        _wait(self._tensors)
        self._devices = [of.device for of in self._tensors]
        for of in self._tensors:
            of.data = of.data.new_empty(0)

    def back(self) -> None:
        """Give the tensors their values again, bit for bit. Where a device has no room, all stay as they are."""
        values = [held.to(device, non_blocking=True) for held, device in zip(self._held, self._devices, strict=True)]
        for of, value in zip(self._tensors, values, strict=True):
            of.data = value
        _wait(self._tensors)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return held.copy_(tensor.detach(), non_blocking=True)


def _wait(tensors: Iterable[torch.Tensor]) -> None:
    for device in {of.device for of in tensors if of.is_cuda}:
        torch.cuda.synchronize(device)
