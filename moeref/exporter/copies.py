"""The regions of a shard as few strided copies between flat memories: plain numbers, worked out once for a plan.

A shard of fused QKV has three regions for every KV group. They follow each other at equal distances, so one copy with
one more dimension moves all of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from moeref.bridge.regions import CopyRegion, Index, Shard

Numbers = tuple[int, ...]


class Strided(NamedTuple):
    """Elements of contiguous memory: the first one, and how far apart its neighbours are along each dimension."""

    offset: int
    strides: Numbers


class Copy(NamedTuple):
    """Copy `size` elements of a shard into a Hugging Face tensor; both are contiguous."""

    size: Numbers
    into: Strided
    source: Strided

    @property
    def is_run(self) -> bool:
        """Whether its elements follow each other on both sides."""
        return self.into.strides == self.source.strides == (1,)

    def shifted(self, offset: int) -> Copy:
        """The same copy, into elements that are `offset` further on."""
        return self._replace(into=Strided(self.into.offset + offset, self.into.strides))


def copies(shard: Shard, shapes: Sequence[Numbers]) -> tuple[tuple[Copy, ...], ...]:
    """For each Hugging Face tensor, of these `shapes`, the copies that move its regions out of `shard`."""
    regions = [[r for r in shard.regions if r.tensor == number] for number in range(len(shapes))]
    flat = ([_flat(r, shape, shard.shape) for r in mine] for mine, shape in zip(regions, shapes, strict=True))
    return tuple(tuple(map(_simple, _joined(mine))) for mine in flat)


def _flat(region: CopyRegion, shape: Numbers, shard_shape: Numbers) -> Copy:
    into_size, into = _strided(region.hf_index, shape)
    size, source = _strided(region.shard_index, shard_shape)
    if region.transposed:
        into = Strided(into.offset, (*into.strides[:-2], into.strides[-1], into.strides[-2]))
        into_size = (*into_size[:-2], into_size[-1], into_size[-2])
    if into_size != size:
        raise ValueError(f"a region of {list(into_size)} elements is filled with {list(size)}: {region}")
    return Copy(size, into, source)


def _strided(index: Index, shape: Numbers) -> tuple[Numbers, Strided]:
    """The size and place of `tensor[index]` in a contiguous tensor of this shape."""
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    size, strides, offset = [], [], 0
    for i, step in zip(index, steps, strict=True):
        if isinstance(i, slice):
            size.append(len(range(i.start, i.stop, i.step or 1)))
            strides.append(step * (i.step or 1))
        offset += step * (i.start if isinstance(i, slice) else i)
    return tuple(size), Strided(offset, tuple(strides))


def _joined(parts: list[Copy]) -> list[Copy]:
    """One copy with one more dimension, if all are alike and at equal distances; else the copies themselves."""
    if len(parts) < 2 or len({(p.size, p.into.strides, p.source.strides) for p in parts}) > 1:
        return parts
    first, second = parts[:2]
    into, source = second.into.offset - first.into.offset, second.source.offset - first.source.offset
    for number, part in enumerate(parts):
        expected = first.into.offset + number * into, first.source.offset + number * source
        if (part.into.offset, part.source.offset) != expected:
            return parts
    joined_into = Strided(first.into.offset, (into, *first.into.strides))
    joined_source = Strided(first.source.offset, (source, *first.source.strides))
    return [Copy((len(parts), *first.size), joined_into, joined_source)]


def _simple(copy: Copy) -> Copy:
    """The same copy with neighbouring dimensions joined where both sides allow it."""
    size: list[int] = []
    into: list[int] = []
    source: list[int] = []
    for n, a, b in zip(copy.size, copy.into.strides, copy.source.strides, strict=True):
        if size and into[-1] == n * a and source[-1] == n * b:
            size[-1], into[-1], source[-1] = size[-1] * n, a, b
        else:
            size.append(n)
            into.append(a)
            source.append(b)
    return Copy(tuple(size), Strided(copy.into.offset, tuple(into)), Strided(copy.source.offset, tuple(source)))


def merged(parts: Iterable[Copy]) -> tuple[Copy, ...]:
    """The copies, with contiguous ones joined if they follow each other on both sides, as gate and up may."""
    joined: list[Copy] = []
    for part in parts:
        if joined and joined[-1].is_run and part.is_run:
            (size,), into, source = joined[-1]
            if (part.into.offset, part.source.offset) == (into.offset + size, source.offset + size):
                joined[-1] = Copy((size + part.size[0],), into, source)
                continue
        joined.append(part)
    return tuple(joined)
