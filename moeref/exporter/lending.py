"""Where buckets get their memory. Fresh memory is slow to touch: the kernel zeroes it, page by page.

A lender keeps memory from one export to the next, and lends it. Buckets that are the consumer's own reuse memory that
no one holds any more, within one stream.
"""

from __future__ import annotations

import sys
from typing import Protocol

import numpy as np
import torch

_LINE = 64


class Borrower(Protocol):
    """A bucket, or whatever else has memory of a lender."""

    def expire(self) -> None:
        """Give the memory back. Raises BucketError if it is still held."""


class Lender:
    """Lends `halves` memories in turn: a bucket is valid until so many more are asked for.

    Two let one bucket travel while the next is made. One lender serves one export at a time; it may serve the next.
    `pinned`: page-locked memory on the host, from which copies to a GPU need not wait.
    """

    def __init__(self, halves: int = 1, *, pinned: bool = False) -> None:
        if halves < 1:
            raise ValueError(f"halves={halves}: memory is lent at least once")
        self._memories: list[torch.Tensor | None] = [None] * halves
        self._borrowers: list[Borrower | None] = [None] * halves
        self._turn, self._pinned = 0, pinned

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of at least `nbytes`. Raises BucketError if the bucket that had it last is held."""
        if borrower := self._borrowers[self._turn]:
            self._borrowers[self._turn] = None
            borrower.expire()
        memory = self._memories[self._turn]
        if memory is None or memory.numel() < nbytes or memory.device != device:
            self._memories[self._turn] = memory = None
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=self._pinned)
            self._memories[self._turn] = memory
        return memory

    def lend(self, borrower: Borrower) -> None:
        """Note who has the memory that was taken last; the next one taken is another, if there are several."""
        self._borrowers[self._turn] = borrower
        self._turn = (self._turn + 1) % len(self._borrowers)

    def end(self) -> None:
        """Take all memory back. Raises BucketError if a bucket is held."""
        borrowers, self._borrowers = self._borrowers, [None] * len(self._borrowers)
        for borrower in borrowers:
            if borrower:
                borrower.expire()


class Owned:
    """Memory that a consumer may keep. What it has dropped, with all tensors there, is given again within one stream.

    Two memories are remembered: while a bucket is made, a `for` loop still has the one before it.
    """

    def __init__(self, usual: int = 0) -> None:
        self._usual = usual  # bytes of fresh memory, at least
        self._last: list[tuple[torch.Tensor, int]] = []  # memory, and its holders while nobody has it

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of at least `nbytes` that nobody holds."""
        if device.type != "cpu":  # PyTorch's allocator keeps that of GPUs, and knows which streams still read it
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        for number, (memory, idle) in enumerate(self._last):
            if memory.numel() >= nbytes and holders(memory) == idle:
                self._last.append(self._last.pop(number))
                return memory[:]
        self._last = [(memory, idle) for memory, idle in self._last[-1:] if holders(memory) > idle]
        memory = _fresh(max(nbytes, self._usual))
        self._last.append((memory, holders(memory)))
        return memory[:]  # a tensor of its own, which counts as a holder


def _fresh(nbytes: int) -> torch.Tensor:
    """Memory of this host. NumPy asks the kernel for huge pages, which PyTorch does not."""
    raw = torch.from_numpy(np.empty(nbytes + _LINE, np.uint8))
    start = -raw.data_ptr() % _LINE
    return raw[start : start + nbytes]


def holders(memory: torch.Tensor) -> int:
    """How many tensors, arrays and storage objects share the memory. It tells by comparison with idle memory."""
    storage = memory.untyped_storage()  # one object as long as anybody has it
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)
