"""Buckets: tensors of a stream side by side in one memory, bounded in bytes, and read again without copying.

The stream is any iterator of (Hugging Face name, tensor): `export`, another bridge's exporter, a `Checkpoint`. What a
loader needs whole (`unit_of`) is not split. A bucket's message holds its own metadata, so that one message of bytes is
all that a receiver needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import xxhash

from moeref.bridge.named import Named
from moeref.exporter.assembly import Filled, fill, segments
from moeref.exporter.cuts import ALIGNMENT, FIXED, BucketError, Entry, aligned, apart, text_bytes
from moeref.exporter.lending import Lender, Owned, holders
from moeref.exporter.peer import Peer
from moeref.exporter.stream import Stream
from moeref.exporter.transfer import Transfer
from moeref.exporter.units import closed_up, unit_of
from moeref.torch_dtypes import dtype_name

#: A message ends with the length of its metadata, the XXH3 of all bytes before it, and this.
MAGIC = b"moerefB1"
_TAIL = 8 + 8 + len(MAGIC)
#: The limit of a bucket's bytes for a stream that is no export, unless the caller gives one.
LIMIT = 64 << 20


class Bucket:
    """Tensors side by side in one memory. A lent bucket is valid until the next is asked for; then it expires.

    A `moeref.sync.Bucket` is a part of a weight update instead, with tensors wherever they are.
    """

    def __init__(self, number: int, entries: tuple[Entry, ...], memory: torch.Tensor | None) -> None:
        self.number, self.entries = number, entries
        self._memory = memory
        self._idle = 0 if memory is None else holders(memory)

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last tensor."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def memory(self) -> torch.Tensor:
        """The bytes; views of them live as long as the bucket. Raises BucketError for a bucket that has expired."""
        if self._memory is None:
            raise BucketError(f"bucket {self.number} was lent until the next was asked for; take own buckets or copy")
        return self._memory

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor in place) in order."""
        memory = self.memory()
        return ((entry.name, entry.view(memory)) for entry in self.entries)

    def message(self, generation: int = 0) -> torch.Tensor:
        """The bucket as bytes that `read` understands, in its own memory: tensors, metadata, checksum."""
        memory, end = self.memory(), aligned(self.nbytes)
        metadata = {
            "tensors": [[e.name, list(e.shape), dtype_name(e.dtype), e.offset] for e in self.entries],
            "number": self.number,
            "generation": generation,
        }
        text = json.dumps(metadata, separators=(",", ":")).encode()
        raw = text + len(text).to_bytes(8, "little")
        message = memory[: end + len(raw) + 16]
        _write(message, end, raw)
        _write(message, end + len(raw), _checksum(message[:-16]) + MAGIC)
        return message

    def expire(self) -> None:
        """Take the memory back. Raises BucketError if tensors of it are still held."""
        memory, self._memory = self.memory(), None
        if holders(memory) > self._idle:
            raise BucketError(
                f"bucket {self.number}, {self.entries[0].name} to {self.entries[-1].name}: tensors of it are held when "
                "the next is asked for, which overwrites them; drop them, or take buckets with lend=False"
            )


def buckets(
    stream: Iterable[Named],
    limit: int | None = None,
    *,
    lend: bool | Lender = False,
    unit: Callable[[str], str] = unit_of,
) -> Iterator[Bucket]:
    """Cut a stream into buckets of at most `limit` bytes, metadata included, or of one unit that is larger.

    limit: by default the bytes of the largest unit of an `export`, which knows them; for other streams LIMIT.

    A bucket is the consumer's own. With `lend` all share one memory: each is valid until the next is asked for, which
    raises BucketError if the one before is held. A `Lender` keeps that memory for the next export, and may have two, so
    that one bucket travels while the next is made. An `export` is assembled in the bucket; tensors of other streams are
    copied. Tensors that are None, as on ranks that do not receive them, are left out. Tensors keep their order, but a
    norm amid a unit of its layer is moved behind that unit. Raises BucketError if any other tensor comes amid a unit.
    """
    lender = Lender() if lend is True else lend or None
    if isinstance(stream, Stream) and not stream.begun:
        yield from _assembled(stream, limit, lender, unit)
    else:
        yield from _copied(closed_up(stream, unit), _OpenBucket(LIMIT if limit is None else limit, lender, unit))
    if lender:
        lender.end()


def _assembled(
    stream: Stream, limit: int | None, lender: Lender | None, unit: Callable[[str], str]
) -> Iterator[Bucket]:
    todo = segments(stream.plan, stream.rank, limit, unit)

    def made(transfer: Transfer, peer: Peer, at: Callable[[str], None]) -> Iterator[Filled]:
        largest = max((segment.cut.nbytes for segment in todo if segment.cut), default=0)
        memory = lender or Owned(largest if limit is None else min(limit, largest))
        return fill(transfer, peer.plan, todo, lambda nbytes: memory.take(nbytes, peer.device), at)

    number = -1  # counted here, since `enumerate` holds on to what it gave last
    for cut, memory in stream.made_by(made):
        bucket = Bucket(number := number + 1, cut.entries, memory)
        del memory
        if lender:
            lender.lend(bucket)
        yield bucket
        del bucket


def _copied(stream: Iterable[tuple[str, torch.Tensor]], filling: _OpenBucket) -> Iterator[Bucket]:
    for name, tensor in stream:
        if not filling.has_room(name, tensor.shape, tensor.nbytes):
            if bucket := filling.emit(name):
                yield bucket
                bucket = None
                filling.begin()
            filling.grow(name, tensor)
        filling.add(name, tensor)
        del tensor
    if bucket := filling.last():
        yield bucket


class _OpenBucket:
    """The bucket that is being filled."""

    def __init__(self, limit: int, lender: Lender | None, unit: Callable[[str], str]) -> None:
        self._limit, self._lender, self._unit = limit, lender, unit
        self._source = lender or Owned()
        self._memory: torch.Tensor | None = None
        self._entries: list[Entry] = []
        self._stash: torch.Tensor | None = None  # the begun unit, while the bucket before it is out
        self._number, self._used, self._text = 0, 0, 0
        self._key, self._key_start = "", 0
        self._ended: set[str] = set()

    def has_room(self, name: str, shape: Sequence[int], nbytes: int) -> bool:
        """Whether the bucket has room for a tensor."""
        # Only a unit that is alone may have more than the limit.
        is_alone = self._unit(name) == self._key and not self._key_start
        capacity = self._memory.numel() if is_alone and self._memory is not None else self._limit
        need = aligned(nbytes) + text_bytes(name, shape)
        return self._used + self._text + need + FIXED <= capacity

    def _room(self, capacity: int, device: torch.device) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._source.take(capacity, device)
        return self._memory

    def _bucket(self, entries: list[Entry]) -> Bucket:
        bucket = Bucket(self._number, tuple(entries), self._memory)
        if self._lender:
            self._lender.lend(bucket)
        return bucket

    def emit(self, name: str) -> Bucket | None:
        """The bucket before tensor `name`, without a begun unit of that tensor; None if nothing else is in it."""
        end = self._key_start if self._unit(name) == self._key else len(self._entries)
        begun = self._entries[end:]
        if self._memory is None or not end:
            return None
        if begun:
            self._stash = self._memory[begun[0].offset : self._used].clone()
        bucket = self._bucket(self._entries[:end])
        moved = [entry._replace(offset=entry.offset - begun[0].offset) for entry in begun]
        self._entries, self._key_start, self._number = moved, 0, self._number + 1
        self._used = self._stash.numel() if self._stash is not None else 0
        self._text = sum(text_bytes(entry.name, entry.shape) for entry in moved)
        self._memory = None
        return bucket

    def begin(self) -> None:
        """Take memory for the next bucket, and put the unit into it that had begun."""
        if self._stash is not None:
            self._room(self._limit, self._stash.device)[: self._used] = self._stash
            self._stash = None

    def grow(self, name: str, tensor: torch.Tensor) -> None:
        """Make room for a unit that is larger than a bucket."""
        if not self.has_room(name, tensor.shape, tensor.nbytes):
            need = self._used + self._text + FIXED + aligned(tensor.nbytes) + text_bytes(name, tensor.shape)
            old, self._memory = self._memory, None
            filled = self._room(max(need + (need if self._used else 0), self._limit), tensor.device)
            if old is not None and self._used:
                filled[: self._used] = old[: self._used]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the bucket. Raises BucketError if its unit has ended."""
        key = self._unit(name)
        if key != self._key:
            if key in self._ended:
                raise apart(name, key)
            self._ended.add(self._key)
            self._key, self._key_start = key, len(self._entries)
        entry = Entry(name, tuple(tensor.shape), tensor.dtype, self._used)
        entry.view(self._room(self._limit, tensor.device)).copy_(tensor)
        self._entries.append(entry)
        self._used += aligned(entry.nbytes)
        self._text += text_bytes(name, entry.shape)

    def last(self) -> Bucket | None:
        """The bucket that is left at the end of the stream; None if that is empty."""
        if self._memory is None or not self._entries:
            return None
        return self._bucket(self._entries)


def read(message: torch.Tensor, generation: int | None = None) -> Bucket:
    """The bucket in the memory of a message. Raises BucketError for other bytes, torn ones, or another generation."""
    raw = message[-_TAIL:].cpu().numpy().tobytes() if message.numel() >= _TAIL else b""
    if raw[16:] != MAGIC:
        raise BucketError(f"{message.numel()} bytes are no whole message of a bucket: they do not end with {MAGIC!r}")
    length = int.from_bytes(raw[:8], "little")
    if length > message.numel() - _TAIL:
        raise BucketError(f"metadata of {length} bytes does not fit into a message of {message.numel()}")
    if _checksum(message[:-16]) != raw[8:16]:
        raise BucketError("the bytes of a bucket are not those that were sent: a torn read")
    text = message[-_TAIL - length : -_TAIL].cpu().numpy().tobytes()
    try:
        metadata = json.loads(text)
        entries = tuple(_entry(*one) for one in metadata["tensors"])
        number, written = int(metadata["number"]), metadata["generation"]
    except (ValueError, KeyError, TypeError) as error:
        raise BucketError(f"metadata of a bucket that cannot be read: {error}") from error
    bucket = Bucket(number, entries, message)
    if generation is not None and written != generation:
        raise BucketError(f"bucket {number} is of generation {written}, expected {generation}: a stale read")
    if not 0 <= bucket.nbytes <= message.numel() - _TAIL - length:
        raise BucketError(f"bucket {number} lists tensors beyond its {message.numel()} bytes")
    return bucket


def _entry(name: str, shape: list[int], dtype: str, offset: int) -> Entry:
    """The entry of a tensor in the metadata. Raises TypeError for what describes no tensor."""
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
