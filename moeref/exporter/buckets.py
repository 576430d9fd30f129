"""Buckets: tensors of a stream side by side in one memory, bounded in bytes, and read again without copying.

The stream is any iterator of (Hugging Face name, tensor): `export`, another bridge's exporter, a `Checkpoint`. What a
loader needs whole (`unit_of`) is not split. A bucket's message holds its own metadata, so that one message of bytes is
all that a receiver needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import xxhash

from moeref.bridge.shard_map import HFTensor
from moeref.exporter.stream import Stream
from moeref.exporter.units import unit_of
from moeref.torch_dtypes import TORCH

#: Tensors begin at multiples of this many bytes.
ALIGNMENT = 64
#: A message ends with the length of its metadata, the XXH3 of all before, and this.
MAGIC = b"moerefB1"
#: Bytes, at most, of a message besides its tensors and their descriptions.
_FIXED = 200
_TAIL = 8 + 8 + len(MAGIC)

Named = tuple[str | HFTensor, torch.Tensor | None]


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
        end += _aligned(entries[-1].nbytes)
    return tuple(entries)


class Bucket:
    """Tensors side by side. A lent one is valid until the next is asked for; later use raises BucketError."""

    def __init__(self, number: int, entries: tuple[Entry, ...], memory: torch.Tensor) -> None:
        self.number, self.entries = number, entries
        self._memory: torch.Tensor | None = memory

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last tensor."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def memory(self) -> torch.Tensor:
        """The bytes. Views of them share the bucket's lifetime."""
        if self._memory is None:
            raise BucketError(f"bucket {self.number} was lent until the next was asked for; take own buckets or copy")
        return self._memory

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor in place) in order."""
        memory = self.memory()
        return ((entry.name, entry.view(memory)) for entry in self.entries)

    def message(self, generation: int = 0) -> torch.Tensor:
        """The bucket as bytes that `read` understands, in its own memory: tensors, metadata, checksum."""
        memory, end = self.memory(), _aligned(self.nbytes)
        told = {
            "tensors": [[e.name, list(e.shape), str(e.dtype).removeprefix("torch."), e.offset] for e in self.entries],
            "number": self.number,
            "generation": generation,
        }
        text = json.dumps(told, separators=(",", ":")).encode()
        raw = text + len(text).to_bytes(8, "little")
        message = memory[: end + len(raw) + 16]
        _write(message, end, raw)
        _write(message, end + len(raw), _checksum(message[:-16]) + MAGIC)
        return message

    def expire(self) -> None:
        """Take the memory back. Raises BucketError if tensors of it are still held."""
        memory, self._memory = self.memory(), None
        if _holders(memory) > 1:
            raise BucketError(
                f"bucket {self.number}, {self.entries[0].name} to {self.entries[-1].name}: tensors of it are held when "
                "the next is asked for, which overwrites them; drop them, or take buckets with lend=False"
            )


def buckets(
    stream: Iterable[Named], limit: int, *, lend: bool = False, unit: Callable[[str], str] = unit_of
) -> Iterator[Bucket]:
    """Cut a stream into buckets of at most `limit` bytes, metadata included, or of one unit that is larger.

    A bucket is the consumer's own, or with `lend` one memory for all: valid until the next is asked for, and held then
    raises BucketError. An `export` is assembled in the bucket; tensors of other streams are copied. Tensors that are
    None, as on ranks that are not the writer, are left out. Raises BucketError if tensors of a unit are apart.
    """
    filling = _Filling(limit, lend, unit)
    if isinstance(stream, Stream):
        filling.expect(stream.plan.tensors)
        stream.place = filling.place
    for described, tensor in stream:
        if tensor is not None:
            name = described if isinstance(described, str) else described.name
            if not filling.fits(name, tensor):
                if bucket := filling.emit(name):
                    yield bucket
                    filling.begin(bucket)
                filling.grow(name, tensor)
            filling.add(name, tensor)
        del tensor
    if bucket := filling.last():
        yield bucket
        if lend:
            bucket.expire()


class _Filling:
    """The bucket in the making."""

    def __init__(self, limit: int, lend: bool, unit: Callable[[str], str]) -> None:
        self._limit, self._lend, self._unit = limit, lend, unit
        self._memory: torch.Tensor | None = None
        self._entries: list[Entry] = []
        self._placed: torch.Tensor | None = None  # handed out by `place`, not yet added
        self._stash: torch.Tensor | None = None  # the begun unit, while the bucket before it is out
        self._number, self._used, self._text = 0, 0, 0
        self._key, self._key_start = "", 0
        self._ended: set[str] = set()
        self._sizes: dict[str, int] = {}  # of units, where a plan says so

    def expect(self, tensors: Iterable[HFTensor]) -> None:
        """Know how large units will be, so that none begins in a bucket that has no room for it."""
        for tensor in tensors:
            key, nbytes = self._unit(tensor.name), prod(tensor.shape) * TORCH[tensor.dtype].itemsize
            self._sizes[key] = self._sizes.get(key, 0) + _aligned(nbytes) + _text(tensor.name, tensor.shape)

    def place(self, tensor: HFTensor, device: torch.device) -> torch.Tensor:
        """Where a tensor is to be made: in the bucket, if it has room."""
        dtype = TORCH[tensor.dtype]
        nbytes = prod(tensor.shape) * dtype.itemsize
        if not self._has_room(tensor.name, tensor.shape, nbytes):
            return torch.empty(tensor.shape, dtype=dtype, device=device)
        entry = Entry(tensor.name, tensor.shape, dtype, self._used)
        self._placed = entry.view(self._room(self._limit, device))
        return self._placed

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the bucket has room; a tensor that was made in it has."""
        return tensor is self._placed or self._has_room(name, tensor.shape, tensor.nbytes)

    def _has_room(self, name: str, shape: Sequence[int], nbytes: int) -> bool:
        key = self._unit(name)
        need, capacity = _aligned(nbytes) + _text(name, shape), self._limit
        if key != self._key:
            need = self._sizes.get(key, need)
        elif self._memory is not None:
            capacity = self._memory.numel()
        return self._used + self._text + need + _FIXED <= capacity

    def _room(self, capacity: int, device: torch.device) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        return self._memory

    def emit(self, name: str) -> Bucket | None:
        """The bucket before tensor `name`, without its unit if that has begun; None if that is all there is."""
        end = self._key_start if self._unit(name) == self._key else len(self._entries)
        begun = self._entries[end:]
        if self._memory is None or not end:
            return None
        if begun:
            self._stash = self._memory[begun[0].offset : self._used].clone()
        bucket = Bucket(self._number, tuple(self._entries[:end]), self._memory)
        moved = [entry._replace(offset=entry.offset - begun[0].offset) for entry in begun]
        self._entries, self._key_start, self._number = moved, 0, self._number + 1
        self._used = self._stash.numel() if self._stash is not None else 0
        self._text = sum(_text(entry.name, entry.shape) for entry in moved)
        return bucket

    def begin(self, last: Bucket) -> None:
        """The memory of the next bucket, with the unit that had begun."""
        if self._lend:
            last.expire()
        if not self._lend or (self._memory is not None and self._memory.numel() > self._limit):
            self._memory = None
        if self._stash is not None:
            self._room(self._limit, self._stash.device)[: self._used] = self._stash
            self._stash = None

    def grow(self, name: str, tensor: torch.Tensor) -> None:
        """Make room for a unit that is larger than a bucket."""
        if not self._has_room(name, tensor.shape, tensor.nbytes):
            need = self._used + self._text + _FIXED + _aligned(tensor.nbytes) + _text(name, tensor.shape)
            known = self._sizes.get(self._unit(name), 0) + _FIXED
            old, self._memory = self._memory, None
            filled = self._room(max(need + (need if self._used else 0), known, self._limit), tensor.device)
            if old is not None and self._used:
                filled[: self._used] = old[: self._used]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor, copied unless it was made here."""
        key = self._unit(name)
        if key != self._key:
            if key in self._ended:
                raise BucketError(f"{name}: other tensors came since the last of {key}, which a loader needs whole")
            self._ended.add(self._key)
            self._key, self._key_start = key, len(self._entries)
        entry = Entry(name, tuple(tensor.shape), tensor.dtype, self._used)
        if tensor is not self._placed:
            entry.view(self._room(self._limit, tensor.device)).copy_(tensor)
        self._placed = None
        self._entries.append(entry)
        self._used += _aligned(entry.nbytes)
        self._text += _text(name, entry.shape)

    def last(self) -> Bucket | None:
        """What is left at the end of the stream."""
        if self._memory is None or not self._entries:
            return None
        return Bucket(self._number, tuple(self._entries), self._memory)


def read(message: torch.Tensor, generation: int | None = None) -> Bucket:
    """The bucket of a message, in place. Raises BucketError for other bytes, torn ones, or another generation."""
    raw = message[-_TAIL:].cpu().numpy().tobytes() if message.numel() >= _TAIL else b""
    if raw[16:] != MAGIC:
        raise BucketError(f"{message.numel()} bytes do not end as a bucket's message does: cut, or none")
    length = int.from_bytes(raw[:8], "little")
    if length > message.numel() - _TAIL:
        raise BucketError(f"metadata of {length} bytes do not fit into a message of {message.numel()}")
    if _checksum(message[:-16]) != raw[8:16]:
        raise BucketError("the bytes of a bucket are not those that were sent: a torn read")
    text = message[-_TAIL - length : -_TAIL].cpu().numpy().tobytes()
    try:
        told = json.loads(text)
        entries = tuple(_entry(*one) for one in told["tensors"])
        number, found = int(told["number"]), told["generation"]
    except (ValueError, KeyError, TypeError) as error:
        raise BucketError(f"metadata of a bucket that cannot be read: {error}") from error
    bucket = Bucket(number, entries, message)
    if generation is not None and found != generation:
        raise BucketError(f"bucket {number} is of generation {found}, expected {generation}: a stale read")
    if not 0 <= bucket.nbytes <= message.numel() - _TAIL - length:
        raise BucketError(f"bucket {number} lists tensors beyond its {message.numel()} bytes")
    return bucket


def _entry(name: str, shape: list[int], dtype: str, offset: int) -> Entry:
    """Raises TypeError for what is no tensor."""
    known = getattr(torch, dtype, None)
    if not isinstance(name, str) or not isinstance(known, torch.dtype):
        raise TypeError(f"tensor {name!r} of dtype {dtype!r}")
    if any(type(n) is not int or n < 0 for n in (*shape, offset)) or offset % ALIGNMENT:
        raise TypeError(f"{name}: shape {shape}, offset {offset}")
    return Entry(name, tuple(shape), known, offset)


def _write(message: torch.Tensor, at: int, raw: bytes) -> None:
    message[at : at + len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _checksum(memory: torch.Tensor) -> bytes:
    return xxhash.xxh3_64_digest(memory.cpu().numpy())


def _holders(memory: torch.Tensor) -> int:
    """How many tensors and arrays share the memory."""
    # Besides them the storage object counts that this call makes.
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata)) - 1


@functools.lru_cache(maxsize=1 << 17)
def _text(name: str, shape: Sequence[int]) -> int:
    """Bytes, at most, of a tensor in the metadata: its name as JSON, shape, dtype, offset."""
    return len(json.dumps(name)) + 20 * len(shape) + 50


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
