"""The bytes of a weight update, from the trainer's writer to every worker of an engine. It needs torch only.

The group is apart from the default one of either side: rank 0 is the trainer's writer and keeps the store, the workers
follow in their order. On a CPU it is gloo's, on GPUs NCCL's; the second form is not tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moeref.exporter.buckets import ALIGNMENT

#: A tensor in a bucket's bytes: its name, dtype and shape. It begins where the one before it ends, aligned.
Described = tuple[str, str, list[int]]


class Place(NamedTuple):
    """Where the group meets, and how many members it has; the same on all of them."""

    address: str
    port: int
    size: int
    backend: str = "gloo"
    seconds: float = 60.0


class Wire:
    """One member of the group. Blocks until all have come; raises RuntimeError after `seconds` of waiting."""

    def __init__(self, place: Place, rank: int) -> None:
        timeout = timedelta(seconds=place.seconds)
        self.device = torch.device("cuda", torch.cuda.current_device()) if place.backend == "nccl" else "cpu"
        self._store = TCPStore(
            place.address, place.port, place.size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        store = PrefixStore("moeref.vllm", self._store)
        self._group: Any
        if place.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, place.size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, place.size, timeout)
        self._group.barrier().wait()

    def broadcast(self, memory: torch.Tensor) -> None:
        """Send from rank 0, receive elsewhere."""
        self._group.broadcast(memory, 0).wait()
        if memory.is_cuda:
            torch.cuda.current_stream().synchronize()


def describe(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Described]:
    """What `unpack` needs to know, in words that JSON has."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]


def pack(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device | str) -> torch.Tensor:
    """The bytes of all tensors, side by side."""
    tensors = [(name, tensor.detach()) for name, tensor in tensors]
    places = _places(describe(tensors))
    memory = torch.empty(places[-1], dtype=torch.uint8, device=device)
    for begin, (_, tensor) in zip(places, tensors, strict=False):
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return memory


def unpack(memory: torch.Tensor, described: Iterable[Described]) -> list[tuple[str, torch.Tensor]]:
    """The tensors, in place."""
    described = list(described)
    return [
        (name, memory[begin : begin + _nbytes(dtype, shape)].view(getattr(torch, dtype)).view(shape))
        for begin, (name, dtype, shape) in zip(_places(described), described, strict=False)
    ]


def size(described: Iterable[Described]) -> int:
    """Bytes of all tensors, side by side."""
    return _places(described)[-1]


def _nbytes(dtype: str, shape: list[int]) -> int:
    return torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize)


def _places(described: Iterable[Described]) -> list[int]:
    """Where each tensor begins, and where the last ends."""
    places = [0]
    for _, dtype, shape in described:
        places.append(places[-1] + -(-_nbytes(dtype, shape) // ALIGNMENT) * ALIGNMENT)
    return places
