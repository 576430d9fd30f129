"""Makes a delta: messages with the elements of new weights whose bytes differ from those of a base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from moeref.bridge.named import Named, named
from moeref.delta import forms
from moeref.delta.apply import Receiver
from moeref.delta.changes import Changes, between, joined, split
from moeref.delta.errors import DeltaError
from moeref.delta.forms import Part
from moeref.delta.messages import FORMAT, Writer
from moeref.delta.state import Bits, State, bits_of
from moeref.torch_dtypes import dtype_name

#: Elements of a span, and bytes compared and hashed at a time: both versions of those stay in the cache.
SPAN = 1 << 20
PIECE = 1 << 19
#: Tensors of at most SMALL bytes are compared together, up to TOGETHER bytes at a time.
SMALL, TOGETHER = 1 << 17, 1 << 21
BUCKET = 64 << 20
Streamed = Iterable[Named] | Mapping[str, torch.Tensor]


class Described(NamedTuple):
    """Name, dtype and shape of a tensor, as a span has them."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Together:
    """Both versions of small tensors, copied end to end: a call for each costs more, and a stream may reuse memory."""

    def __init__(self) -> None:
        self._copies = np.empty((2, TOGETHER), np.uint8)
        self._held: list[tuple[Described, int]] = []
        self._end, self._dtype = 0, np.dtype(np.uint8)

    def fits(self, new: Bits) -> bool:
        """Whether there is room for a tensor, and its elements have as many bytes as those before."""
        return not self._held or (self._dtype == new.dtype and self._end + new.nbytes <= TOGETHER)

    def add(self, described: Described, old: Bits, new: Bits) -> None:
        """Copy both versions of a tensor."""
        end = self._end + new.nbytes
        for into, bits in zip(self._copies, (old, new), strict=True):
            into[self._end : end] = bits.view(np.uint8)
        self._held.append((described, new.size))
        self._end, self._dtype = end, new.dtype

    def changes(self) -> Iterator[tuple[Described, Changes]]:
        """The changes of each tensor, in order, as views of the copies. No tensor is held afterwards."""
        old, new = (copies[: self._end].view(self._dtype) for copies in self._copies)
        held, self._held, self._end = self._held, [], 0
        sizes = [size for _, size in held]
        yield from zip((one for one, _ in held), split(between(old, new), sizes), strict=True)


class Delta:
    """A delta, made while it is iterated over, once. After that `state` is the state of the new version.

    state: the state of the base. base, new: the tensors of both, as iterables of (Hugging Face name, tensor) in the
    same order, or `base` as a mapping. Held in memory at a time are a tensor of each, copies of small ones (4 MiB) and
    one message, of at most `bucket` bytes and a span more.

    Raises DeltaError, with the tensor's name, where names, dtypes or shapes differ, where the bytes of `base` are not
    those of `state` (`trusted` leaves that out), and for a version that is no int or not later.
    """

    def __init__(
        self,
        state: State,
        base: Streamed,
        new: Iterable[Named],
        version: int,
        *,
        zstd: bool = False,
        bucket: int = BUCKET,
        trusted: bool = False,
    ) -> None:
        if type(version) is not int or version <= state.version or state.version < 0:
            raise DeltaError(f"version {version} has to be an int later than its base, {state.version}, from 0 on")
        self._base, self._new = state, _pairs(base, new)
        self._version, self._limit, self._trusted = version, bucket, trusted
        self._encode = forms.encode_zstd if zstd else forms.encode
        self._writer, self._zstd = Writer(zstd=zstd), zstd
        self._spans: list[dict[str, Any]] = []
        self._body: list[Part] = []
        self._bytes = 0
        self._hashes: dict[str, str] = {}  # of tensors that no message has yet
        self._changed: dict[str, str] = {}
        self._seen: set[str] = set()
        self._together = Together()
        self._state: State | None = None

    @property
    def state(self) -> State:
        """The state of the new version. Raises DeltaError before the delta is complete."""
        if self._state is None:
            raise DeltaError(f"the delta to version {self._version} is not complete: iterate over all of it first")
        return self._state

    def __iter__(self) -> Iterator[bytes]:
        if self._writer.count:
            raise DeltaError("a delta is made once: keep its messages")
        base = self._base
        header = {"kind": "header", "format": FORMAT, "version": self._version, "base": base.version}
        yield self._writer.message({**header, "base_hash": base.hash, "zstd": self._zstd})
        for name, old, new in self._new:
            yield from self._tensor(name, old, new)
        yield from self._flush()
        if missing := sorted(base.tensors.keys() - self._seen):
            raise DeltaError(f"{len(missing)} tensors of the base are not in the stream, first {missing[0]}")
        if self._spans or self._hashes:
            yield self._emit()
        state = base.after(self._version, self._changed)
        yield self._writer.message({"kind": "end", "messages": self._writer.count + 1, "hash": state.hash})
        self._state = state

    def _tensor(self, name: str, old: torch.Tensor, new: torch.Tensor) -> Iterator[bytes]:
        self._compare(name, old, new)
        before, after = bits_of(name, old), bits_of(name, new)
        described = Described(name, dtype_name(new.dtype), new.shape)
        small = after.nbytes <= SMALL
        if not (small and self._together.fits(after)):
            yield from self._flush()
        if not small:
            yield from self._large(described, before, after)
            return
        if not self._trusted:
            self._check_base(name, xxhash.xxh3_64_hexdigest(before))
        self._together.add(described, before, after)

    def _flush(self) -> Iterator[bytes]:
        """Add the changes of the small tensors that are held to the next message."""
        for described, changes in self._together.changes():
            if changes.count:
                yield from self._span(changes, described, 0)
                self._hashes[described.name] = self._changed[described.name] = xxhash.xxh3_64_hexdigest(changes.new)

    def _large(self, described: Described, before: Bits, after: Bits) -> Iterator[bytes]:
        was, now = xxhash.xxh3_64(), xxhash.xxh3_64()
        changed = 0
        for start in range(0, before.size, SPAN):
            changes = self._changes(before[start : start + SPAN], after[start : start + SPAN], was, now)
            if changes.count:
                changed += changes.count
                yield from self._span(changes, described, start)
        if not self._trusted:
            self._check_base(described.name, was.hexdigest())
        if changed:
            self._hashes[described.name] = self._changed[described.name] = now.hexdigest()

    def _check_base(self, name: str, found: str) -> None:
        if found != self._base.tensors[name].hash:
            raise DeltaError(f"{name}: the base is not version {self._base.version}: its bytes have another hash")

    def _compare(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        if name in self._seen:
            raise DeltaError(f"{name} comes twice in the stream")
        self._seen.add(name)
        known = self._base.tensors.get(name)
        if known is None:
            raise DeltaError(f"{name} is not in the base, version {self._base.version}")
        for tensor in (old, new):
            if dtype_name(tensor.dtype) != known.dtype or tensor.shape != known.shape:
                found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                raise DeltaError(f"{name} is {found}, in version {self._base.version} {known.dtype} {[*known.shape]}")

    def _changes(self, old: Bits, new: Bits, was: xxhash.xxh3_64, now: xxhash.xxh3_64) -> Changes:
        """The changes of one span; its bytes are added to the hashes of both tensors, `was` and `now`."""
        pieces, elements = [], PIECE // new.itemsize
        for at in range(0, new.size, elements):
            a, b = old[at : at + elements], new[at : at + elements]
            pieces.append(between(a, b))
            now.update(b)
            if not self._trusted:
                was.update(a)
        return joined(new, pieces)

    def _span(self, changes: Changes, described: Described, start: int) -> Iterator[bytes]:
        """Add the changes of one span to the next message, and yield that if it is full."""
        form, parts = self._encode(changes)
        lengths = [len(part) for part in parts]
        name, dtype, shape = described
        span = {"name": name, "dtype": dtype, "shape": shape, "start": start, "elements": changes.new.size}
        self._spans.append(span | {"form": form, "changed": changes.count, "bytes": lengths})
        self._body += parts
        self._bytes += sum(lengths)
        if self._bytes >= self._limit:
            yield self._emit()

    def _emit(self) -> bytes:
        message = self._writer.message({"kind": "tensors", "spans": self._spans, "hashes": self._hashes}, self._body)
        self._spans, self._hashes, self._body, self._bytes = [], {}, [], 0
        return message


def _pairs(base: Streamed, new: Iterable[Named]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, base tensor, new tensor) in the order of `new`."""
    if isinstance(base, Mapping):
        for name, tensor in named(new):
            if name not in base:
                raise DeltaError(f"{name} is not in the base")
            yield name, base[name], tensor
        return
    olds = named(base)
    for name, tensor in named(new):
        old, was = next(olds, ("nothing more", tensor))
        if old != name:
            raise DeltaError(f"{name} comes where the base has {old}: give both in one order, or base as a mapping")
        yield name, was, tensor


class Sender:
    """The trainer's side: each delta is against the last version that the receiver has acknowledged.

    Holds a copy of that version in host memory, and the deltas made since. Versions may be skipped or lost.
    """

    def __init__(self, version: int, stream: Iterable[Named]) -> None:
        self._tensors = {name: _copy(tensor) for name, tensor in named(stream)}
        self._receiver = Receiver(version, self._tensors)
        self._made: dict[int, tuple[list[bytes], str]] = {}
        self._last = version

    @property
    def acknowledged(self) -> State:
        """The version against which the next delta is made."""
        return self._receiver.state

    def delta(self, version: int, stream: Iterable[Named], *, zstd: bool = False, bucket: int = BUCKET) -> list[bytes]:
        """The messages of a delta from the last acknowledged version to `version`, whose tensors are `stream`.

        Raises DeltaError as `Delta` does, and for a version that is not later than the last one made.
        """
        if version <= self._last:
            raise DeltaError(f"version {version}: {self._last} has been made already; versions grow")
        state = self.acknowledged
        made = Delta(state, self._tensors, stream, version, zstd=zstd, bucket=bucket, trusted=True)
        messages = list(made)
        self._made[version], self._last = (messages, made.state.hash), version
        return messages

    def acknowledge(self, version: int, hash: str) -> None:
        """Note that the receiver holds `version`. hash: that of the state that `Receiver.apply` returned.

        Deltas against earlier versions are dropped: a receiver refuses them from now on. Raises DeltaError for a
        version whose delta does not wait to be acknowledged, and for another hash.
        """
        if (version, hash) == (self.acknowledged.version, self.acknowledged.hash):
            return
        if version not in self._made:
            waiting = ", ".join(map(str, self._made)) or "none"
            raise DeltaError(f"version {version} is acknowledged, but the deltas that wait are {waiting}")
        messages, expected = self._made[version]
        if hash != expected:
            raise DeltaError(f"the receiver's version {version} has hash {hash}, expected {expected}: send it whole")
        self._receiver.apply(messages)
        self._made.clear()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    own = torch.empty(tensor.shape, dtype=tensor.dtype)
    own.copy_(tensor.detach())
    return own
