"""How one rank of an export reaches another: messages of bytes, and the memory that they are in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from moeref.exporter.batches import ShardMessage
from moeref.exporter.plan import ExportError, Plan


class Peer(NamedTuple):
    """This rank among the others. `group` holds the ranks of the layout in order."""

    plan: Plan
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    def send(self, memory: torch.Tensor, rank: int) -> dist.P2POp:
        """The operation, not begun yet, that sends `memory` to a rank of the layout."""
        return dist.P2POp(dist.isend, memory, self._global(rank), self.group)

    def receive(self, memory: torch.Tensor, rank: int) -> dist.P2POp:
        """The operation, not begun yet, that receives `memory` from a rank of the layout."""
        return dist.P2POp(dist.irecv, memory, self._global(rank), self.group)

    def _global(self, rank: int) -> int:
        """The global rank of a rank of the layout; they differ where engines share the world with the trainers."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def bytes(self, count: int) -> torch.Tensor:
        """Memory for messages."""
        if count and self.device.type == "cpu":  # NumPy asks the kernel for huge pages, which PyTorch does not
            return torch.from_numpy(np.empty(count, np.uint8))
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def all_well(self, is_well: bool) -> bool:
        """Whether all ranks are well: a collective, which waits for the last of them."""
        ill = torch.tensor([not is_well], dtype=torch.int32, device=self.device)
        dist.all_reduce(ill, dist.ReduceOp.MAX, group=self.group)
        return not int(ill)

    @contextmanager
    def naming(self, messages: Sequence[ShardMessage]) -> Iterator[None]:
        """Turn an error of the block into an ExportError that names the tensors and ranks of `messages`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            numbers = [sent.param for message in messages for sent in message.shards]
            first, last = (self.plan.params[pick(numbers)][1].hf[0].name for pick in (min, max))
            names = first if first == last else f"{first} to {last}"
            owners = ranks_text({message.owner for message in messages})
            receivers = ranks_text({rank for message in messages for rank in message.receivers})
            raise ExportError(f"rank {self.rank}: {names}, from {owners} to {receivers}: {error}") from error


def ranks_text(ranks: Collection[int]) -> str:
    """A few ranks by number, many by count."""
    if len(ranks) > 4:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


class Buffers:
    """Buffers of bytes that are used again. A message larger than a batch gets one of its own, used once."""

    def __init__(self, peer: Peer, sizes: Sequence[int]) -> None:
        self._peer = peer
        self._usual = max((n for n in sizes if n <= peer.plan.in_flight_bytes // 2), default=0)
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
