"""How one rank of an export reaches another: messages of bytes, and the memory that they are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from moeref.exporter.batches import Message
from moeref.exporter.plan import ExportError, Plan

#: The bytes with which the writer asks for a message, and those that say what state a message is in.
GO, STOP, GOOD, FAILED = 1, 2, 3, 4


class Peer(NamedTuple):
    """This rank among the others. `group` holds the ranks of the layout in order."""

    plan: Plan
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begin to send `tensor` to a rank of the layout."""
        return _work(dist.isend(tensor, dst=self._global(rank), group=self.group))

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begin to receive `tensor` from a rank of the layout."""
        return _work(dist.irecv(tensor, src=self._global(rank), group=self.group))

    def _global(self, rank: int) -> int:
        """The global rank of the layout's; they differ where engines share the world with the trainers."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def bytes(self, count: int) -> torch.Tensor:
        """Memory for a message."""
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def state(self, state: int) -> torch.Tensor:
        """A message of one byte."""
        return torch.tensor([state], dtype=torch.uint8, device=self.device)

    @contextmanager
    def naming(self, message: Message) -> Iterator[None]:
        """An error between here and there names the tensors and the ranks."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            params = self.plan.params
            first, last = (params[message.shards[i].param][1].hf[0].name for i in (0, -1))
            names = first if first == last else f"{first} to {last}"
            where = f"from rank {message.owner} to rank {self.plan.writer}"
            raise ExportError(f"rank {self.rank}: {names}, {where}: {error}") from error


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ExportError("this process is not in the group")
    return work


class Buffers:
    """Buffers of bytes that are used again. A message of more than half a bucket gets one of its own, used once."""

    def __init__(self, peer: Peer, sizes: Sequence[int]) -> None:
        self._peer = peer
        self._usual = max((n for n in sizes if n <= peer.plan.bucket_bytes // 2), default=0)
        self._free: list[torch.Tensor] = []

    def size(self, nbytes: int) -> int:
        """The size of the buffer that `take` gives."""
        return max(nbytes, self._usual)

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes`."""
        if self.size(nbytes) > self._usual:
            self._free.clear()
        return self._free.pop() if self._free else self._peer.bytes(self.size(nbytes))

    def give(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that is not read or written any more."""
        if buffer.numel() == self._usual:
            self._free.append(buffer)
