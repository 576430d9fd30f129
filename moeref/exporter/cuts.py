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
    """A stream cannot be cut into buckets, a lent bucket is used too late, or bytes are no message of a bucket."""


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
        end += padded(entries[-1].shape, dtype)
    return tuple(entries)


@functools.lru_cache(maxsize=1 << 10)
def padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor of this shape, up to where the next one begins."""
    return aligned(prod(shape) * dtype.itemsize)


class Cut(NamedTuple):
    """A bucket before it is filled: its tensors, and the bytes that its message takes at most."""

    entries: tuple[Entry, ...]
    nbytes: int


def cuts(tensors: Iterable[HFTensor], limit: int | None, unit: Callable[[str], str]) -> tuple[Cut, ...]:
    """Buckets of at most `limit` bytes, metadata included, or of one unit that is larger; units stay whole.

    limit: None stands for the bytes of the largest unit. Raises BucketError if tensors of a unit are apart.
    """
    groups: list[tuple[list[HFTensor], int]] = []
    units = list(_units(tensors, unit))
    # Bytes of the tensors of each unit, and of their descriptions.
    sizes = [sum([padded(shape, TORCH[dtype]) + text_bytes(name, shape) for name, shape, dtype in m]) for m in units]
    limit = max(sizes, default=0) + FIXED if limit is None else limit
    for mine, size in zip(units, sizes, strict=True):
        group, used = groups[-1] if groups else ([], limit)
        if used + size + FIXED > limit:
            groups.append((mine, size))
        else:
            groups[-1] = group + mine, used + size
    return tuple(Cut(_entries(group), used + FIXED) for group, used in groups)


def _entries(group: list[HFTensor]) -> tuple[Entry, ...]:
    return side_by_side([(name, shape, TORCH[dtype]) for name, shape, dtype in group])


def _units(tensors: Iterable[HFTensor], unit: Callable[[str], str]) -> Iterable[list[HFTensor]]:
    """Tensors that follow each other and are one unit."""
    units: dict[str, list[HFTensor]] = {}
    last, mine = None, list[HFTensor]()
    for tensor in tensors:
        key = unit(tensor.name)
        if key != last:
            if key in units:
                raise apart(tensor.name, key)
            units[key] = mine = []
            last = key
        mine.append(tensor)
    return units.values()


def apart(name: str, key: str) -> BucketError:
    """The error for a tensor that does not follow its unit."""
    return BucketError(f"{name}: other tensors came since the last of {key}, which a loader needs whole")


def text_bytes(name: str, shape: Sequence[int]) -> int:
    """Bytes, at most, of a tensor in the metadata: its name as JSON, shape, dtype, offset."""
    # Printable ASCII is written as it is, but for two characters.
    is_plain = name.isascii() and name.isprintable() and '"' not in name and "\\" not in name
    return (len(name) + 2 if is_plain else len(json.dumps(name))) + 20 * len(shape) + 50


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
