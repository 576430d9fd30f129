"""Which positions of a sequence each rank holds, in which order, and how to put the parts together again.

Context parallelism splits a sequence zigzag, so that causal attention costs every rank the same: of 2·CP equal chunks
rank r holds chunk r and chunk 2·CP-1-r. Sequence parallelism splits the part of a rank into TP contiguous runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeref.layout.errors import LayoutError


def zigzag(length: int, cp: int, rank: int) -> tuple[int, ...]:
    """The positions of CP rank `rank`, as megatron-core splits tokens and rotary embeddings.

    Raises LayoutError unless 2·cp divides `length` (cp 1 takes any length).
    """
    _check(length, cp, rank, 2 * cp if cp > 1 else 1, f"2·cp = 2·{cp}")
    chunk = length // (2 * cp)
    chunks = (rank, 2 * cp - 1 - rank)
    return tuple(range(length)) if cp == 1 else tuple(c * chunk + i for c in chunks for i in range(chunk))


def contiguous(length: int, parts: int, rank: int) -> tuple[int, ...]:
    """The `rank`-th of `parts` equal runs. Raises LayoutError unless `parts` divides `length`."""
    _check(length, parts, rank, parts, f"{parts}")
    return tuple(range(rank * length // parts, (rank + 1) * length // parts))


def held(length: int, *, cp: int, cp_rank: int, tp: int = 1, tp_rank: int = 0) -> tuple[int, ...]:
    """The positions of one rank: its CP part or, with tp > 1, its run of that part under sequence parallelism."""
    part = zigzag(length, cp, cp_rank)
    return tuple(part[i] for i in contiguous(len(part), tp, tp_rank))


def restored(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The index of each position in the concatenation of `parts`: `joined[restored(parts)]` is in order.

    Raises LayoutError if the parts do not hold every position once.
    """
    joined = [position for part in parts for position in part]
    if sorted(joined) != list(range(len(joined))):
        raise LayoutError(f"the parts do not hold each of {len(joined)} positions once: {joined}")
    return tuple(sorted(range(len(joined)), key=joined.__getitem__))


def _check(length: int, parts: int, rank: int, divisor: int, said: str) -> None:
    if not 0 <= rank < parts:
        raise LayoutError(f"rank {rank} is outside {parts} parts of a sequence (0 to {parts - 1})")
    if length % divisor:
        raise LayoutError(
            f"a sequence of {length} tokens is not divisible by {said}; pad it to a multiple of {divisor}"
        )
