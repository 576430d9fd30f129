"""Where a stream is cut into buckets: arithmetic on the tensors of a plan, before any memory is filled."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from moeref.bridge.shard_map import HFTensor
from moeref.torch_dtypes import TORCH

#: Tensors begin at multiples of this many bytes.
ALIGNMENT = 64
#: Bytes, at most, of a message besides its tensors and their descriptions.
FIXED = 200


class BucketError(RuntimeError):
    """A stream that cannot be cut into buckets, a bucket used after its time, or a message that is none."""


class Entry(NamedTuple):
    """A tensor in a bucket, from byte `offset` on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in place."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def side_by_side(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> tuple[Entry, ...]:
    """Where each (name, shape, dtype) is in a bucket of all of them, in order."""
    entries: list[Entry] = []
    end = 0
    for name, shape, dtype in tensors:
        entries.append(Entry(name, tuple(shape), dtype, end))
        end += aligned(entries[-1].nbytes)
    return tuple(entries)


class Cut(NamedTuple):
    """A bucket that is not filled: its tensors, and the bytes that its message takes at most."""

    entries: tuple[Entry, ...]
    nbytes: int


def cuts(tensors: Iterable[HFTensor], limit: int, unit: Callable[[str], str]) -> tuple[Cut, ...]:
    """Buckets of at most `limit` bytes, metadata included, or of one unit that is larger; units stay whole.

    Raises BucketError if tensors of a unit are apart.
    """
    groups: list[list[HFTensor]] = [[]]
    used = 0
    for mine in _units(tensors, unit):
        size = _size(mine)
        if groups[-1] and used + size + FIXED > limit:
            groups.append([])
            used = 0
        groups[-1] += mine
        used += size
    made = (side_by_side((name, shape, TORCH[dtype]) for name, shape, dtype in group) for group in groups)
    return tuple(Cut(entries, _size(group) + FIXED) for entries, group in zip(made, groups, strict=True) if group)


def _size(tensors: Sequence[HFTensor]) -> int:
    """Bytes of tensors and their descriptions."""
    described = sum(text_bytes(tensor.name, tensor.shape) for tensor in tensors)
    return described + sum(aligned(prod(t.shape) * TORCH[t.dtype].itemsize) for t in tensors)


def _units(tensors: Iterable[HFTensor], unit: Callable[[str], str]) -> Iterable[list[HFTensor]]:
    """Tensors that follow each other and are one unit."""
    found: dict[str, list[HFTensor]] = {}
    last = None
    for tensor in tensors:
        key = unit(tensor.name)
        if key != last and key in found:
            raise apart(tensor.name, key)
        found.setdefault(key, []).append(tensor)
        last = key
    return found.values()


def apart(name: str, key: str) -> BucketError:
    """The error for a tensor that does not follow its unit."""
    return BucketError(f"{name}: other tensors came since the last of {key}, which a loader needs whole")


@functools.lru_cache(maxsize=1 << 17)
def text_bytes(name: str, shape: Sequence[int]) -> int:
    """Bytes, at most, of a tensor in the metadata: its name as JSON, shape, dtype, offset."""
    return len(json.dumps(name)) + 20 * len(shape) + 50


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
