"""Sends the bytes of a weight update from the trainer's writer to every worker of an engine. It needs torch only.

The process group is not the default one of either side: rank 0 is the trainer's writer and keeps the store, the workers
follow in their order. gloo carries tensors of a CPU, NCCL those of GPUs, one GPU a member.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moeref.exporter.cuts import Entry, side_by_side
from moeref.torch_dtypes import dtype_name

#: A tensor in a bucket's bytes, which are laid out as `moeref.exporter.buckets` does: its name, dtype and shape.
Described = tuple[str, str, list[int]]


class Place(NamedTuple):
    """Where the group meets, and how many members it has; the same on all of them."""

    address: str
    port: int
    size: int
    backend: str = "gloo"
    seconds: float = 60.0

    def check(self) -> None:
        """Raises ValueError for a place where this process cannot join."""
        if self.backend not in ("gloo", "nccl") or self.size < 2:
            raise ValueError(f"{self}: backend gloo or nccl, and a size of 1 + workers")
        if self.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise ValueError(f"{self}: NCCL needs a GPU and a torch with NCCL in every member; on a CPU take gloo")


class Wire:
    """One member of the group. Waits until all members have joined; raises RuntimeError after `seconds` of that."""

    def __init__(self, place: Place, rank: int) -> None:
        place.check()
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

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send tensors from rank 0, while all others receive."""
        entries = side_by_side((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
        memory = _memory(entries, self.device)
        for entry, (_, tensor) in zip(entries, tensors, strict=True):
            entry.view(memory).copy_(tensor.detach())
        self._broadcast(memory)

    def receive(self, described: Iterable[Described]) -> tuple[tuple[str, torch.Tensor], ...]:
        """The tensors that rank 0 sends, in memory of their own."""
        entries = side_by_side((name, shape, getattr(torch, dtype)) for name, dtype, shape in described)
        memory = _memory(entries, self.device)
        self._broadcast(memory)
        return tuple((entry.name, entry.view(memory)) for entry in entries)

    def _broadcast(self, memory: torch.Tensor) -> None:
        self._group.broadcast(memory, 0).wait()
        if memory.is_cuda:
            torch.cuda.current_stream().synchronize()


def describe(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Described]:
    """Name, dtype and shape of each tensor, which `receive` needs, as JSON can hold them."""
    return [(name, dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors]


def _memory(entries: Sequence[Entry], device: torch.device | str) -> torch.Tensor:
    nbytes = max((entry.offset + entry.nbytes for entry in entries), default=0)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
