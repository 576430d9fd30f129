"""Memory that is lent to one bucket after the other, and kept for the next export: fresh memory is slow to touch."""

from __future__ import annotations

from typing import Protocol

import torch


class Borrower(Protocol):
    """What has memory of a lender."""

    def expire(self) -> None:
        """Give the memory back. Raises BucketError if it is still held."""


class Lender:
    """As many memories as `halves`, lent in turn: a bucket is valid until so many more are asked for.

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
        """Note who has the memory that was taken; the next is another, if there is one."""
        self._borrowers[self._turn] = borrower
        self._turn = (self._turn + 1) % len(self._borrowers)

    def end(self) -> None:
        """Take all memory back. Raises BucketError if a bucket is held."""
        borrowers, self._borrowers = self._borrowers, [None] * len(self._borrowers)
        for borrower in borrowers:
            if borrower:
                borrower.expire()
