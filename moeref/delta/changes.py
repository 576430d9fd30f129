"""Which elements of a span differ between two versions: words of 8 bytes are compared, then elements of unequal words.

If 1 % of bf16 elements differ, 4 % of the words do, and little more is read than the two versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moeref.delta.state import Bits

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: If more than one word in this many differs, all elements are compared.
_MANY = 8
#: In spans of at most this many bytes all elements are compared: comparing words takes more calls.
_SHORT = 1 << 17
#: In a mask of fewer flags, numpy finds those that are true quicker one by one than in groups.
_FEW = 1 << 16


@dataclass(eq=False)
class Changes:
    """The changed elements of a span, whose new elements are `new`.

    If few changed, `where` has their positions and `found` their values; else `flags` is true at those that changed.
    """

    new: Bits
    where: Positions | None = None
    found: Bits | None = None
    flags: Mask | None = None

    @cached_property
    def count(self) -> int:
        """How many elements changed."""
        return int(np.count_nonzero(self.mask)) if self.where is None else self.where.size

    @cached_property
    def positions(self) -> Positions:
        """The positions of the changed elements in the span, ascending."""
        return find(self.mask, self.count) if self.where is None else self.where

    @cached_property
    def values(self) -> Bits:
        """The changed elements of the new version."""
        return self.new.take(self.positions) if self.found is None else self.found

    @cached_property
    def mask(self) -> Mask:
        """True at changed elements."""
        if self.flags is not None:
            return self.flags
        mask = np.zeros(self.new.size, np.bool_)
        mask[self.positions] = True
        return mask


def between(old: Bits, new: Bits) -> Changes:
    """The changes of `new` against `old`, quickest if both fit in the cache: what differs is read again."""
    if new.nbytes <= _SHORT:
        return Changes(new, flags=old != new)
    whole = new.nbytes // 8 * 8 // new.itemsize
    a, b = old[:whole].view(np.int64), new[:whole].view(np.int64)
    hit = a != b
    count = int(np.count_nonzero(hit))
    if count * _MANY > hit.size:
        return Changes(new, flags=old != new)
    at = find(hit, count)
    was, now = a.take(at).view(new.dtype), b.take(at).view(new.dtype)
    inner = (was != now).nonzero()[0]
    positions, values = _inside(at, inner, (8 // new.itemsize).bit_length() - 1), now.take(inner)
    rest = (old[whole:] != new[whole:]).nonzero()[0] + whole
    if rest.size:
        positions, values = np.concatenate([positions, rest]), np.concatenate([values, new.take(rest)])
    return Changes(new, positions, values)


def joined(new: Bits, pieces: Sequence[Changes]) -> Changes:
    """The changes of a whole span `new`, from those of the pieces that it consists of, in order."""
    if len(pieces) == 1:
        return pieces[0]
    if any(piece.where is None for piece in pieces):
        return Changes(new, flags=np.concatenate([piece.mask for piece in pieces]))
    starts = itertools.accumulate((piece.new.size for piece in pieces[:-1]), initial=0)
    positions = np.concatenate([piece.positions + start for piece, start in zip(pieces, starts, strict=True)])
    return Changes(new, positions, np.concatenate([piece.values for piece in pieces]))


def split(changes: Changes, sizes: Sequence[int]) -> Iterator[Changes]:
    """The changes of each piece of a span; `sizes` are the pieces' elements, in order. Inverse of `joined`."""
    pieces = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    if changes.where is None:
        yield from (Changes(changes.new[a:b], flags=changes.mask[a:b]) for a, b in pieces)
        return
    cuts = np.searchsorted(changes.where, [start for start, _ in pieces]).tolist()
    for (a, b), (low, high) in zip(pieces, itertools.pairwise([*cuts, changes.count]), strict=True):
        yield Changes(changes.new[a:b], changes.where[low:high] - a, changes.values[low:high])


def find(mask: Mask, count: int) -> Positions:
    """The positions at which `mask` is true, ascending; `count` is how many there are.

    If less than a tenth is true, numpy looks for each in turn, which is slow: groups of 8 are looked at first.
    """
    if mask.size < _FEW or count * 10 > mask.size:
        return mask.nonzero()[0]
    whole = mask.size - mask.size % 8
    groups = mask[:whole].view(np.uint64)
    in_groups = groups != 0
    hit = find(in_groups, int(np.count_nonzero(in_groups)))
    positions = _inside(hit, groups.take(hit).view(np.bool_).nonzero()[0], 3)
    rest = mask[whole:].nonzero()[0] + whole
    return np.concatenate([positions, rest]) if rest.size else positions


def _inside(groups: Positions, inner: Positions, bits: int) -> Positions:
    """The positions of elements in a span that is cut into groups of 2 to the power of `bits` elements.

    groups: the numbers of some groups. inner: the positions of elements if only these groups are laid end to end.
    """
    positions: Positions = groups.take(inner >> bits)
    positions <<= bits
    positions += inner & ((1 << bits) - 1)
    return positions
