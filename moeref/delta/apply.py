"""Applying a delta: everything is checked first, then values are written, then what was written is checked."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from moeref.delta import forms
from moeref.delta.changes import Positions
from moeref.delta.errors import DeltaError
from moeref.delta.forms import Part
from moeref.delta.messages import Reader
from moeref.delta.state import Bits, Fingerprint, State, bits_of
from moeref.torch_dtypes import BITS

T = TypeVar("T")
#: `map`, or the `map` of a pool of threads.
Each = Callable[..., Iterable[Any]]


class Change(NamedTuple):
    """New values of one span of a tensor, at `positions` counted from `start`; None stands for every element."""

    name: str
    start: int
    positions: Positions | None
    values: Bits


class Span(NamedTuple):
    """One span of a message: its fields, the body of the message, and the byte `at` which its parts begin there."""

    fields: dict[str, Any]
    body: memoryview
    at: int
    zstd: bool

    def check(self) -> None:
        """Raise DeltaError, with the tensor's name, if the parts are not as the span's form has them."""
        form, elements, changed = self.fields["form"], self.fields["elements"], self.fields["changed"]
        try:
            forms.check(form, self._opened(), elements, self._dtype, changed)
        except DeltaError as error:
            raise DeltaError(f"{self.fields['name']}, from element {self.fields['start']}: {error}") from None

    def change(self) -> Change:
        """The values to write, decoded from parts that `check` has accepted."""
        form, elements, dtype = self.fields["form"], self.fields["elements"], self._dtype
        if form == "index" and elements <= forms.BLOCK and not self.zstd:
            found: tuple[Positions | None, Bits] = forms.decode_short(self.body, self.at, self.fields["changed"], dtype)
        else:
            found = forms.decode(form, self._opened() if self.zstd else self.parts, elements, dtype)
        return Change(self.fields["name"], self.fields["start"], *found)

    @property
    def parts(self) -> list[memoryview]:
        """The parts as they are in the body, with zstd if it has that."""
        ends = itertools.accumulate(self.fields["bytes"], initial=self.at)
        return [self.body[a:b] for a, b in itertools.pairwise(ends)]

    @property
    def short(self) -> bool:
        """Whether `forms.short_indices` can check it together with others."""
        form, count = self.fields["form"], self.fields["changed"]
        if form != "index" or self.zstd or self.at % 2 or self.fields["elements"] > forms.BLOCK:
            return False
        return self._dtype.itemsize == 2 and self.fields["bytes"] == [4, 2 * count, 2 * count]

    @property
    def _dtype(self) -> np.dtype[Any]:
        return _integers(self.fields["dtype"])

    def _opened(self) -> Sequence[Part]:
        """The parts, decompressed. Raises DeltaError for a number or sizes of parts that the form does not allow."""
        form, changed, width = self.fields["form"], self.fields["changed"], self._dtype.itemsize
        bounds = forms.sizes(form, self.fields["elements"], width, changed, self.zstd)
        parts = self.parts
        if len(parts) != len(bounds):
            raise DeltaError(f"{form} has {len(bounds)} parts, not {len(parts)}")
        if self.zstd:
            return forms.decompress(parts, bounds, width)
        for part, (least, most) in zip(parts, bounds, strict=True):
            if not least <= len(part) <= most:
                raise DeltaError(f"{form} of {changed} changes has parts of {self.fields['bytes']} bytes")
        return parts


@functools.cache
def _integers(dtype: str) -> np.dtype[Any]:
    """The little-endian integers that hold the bits of elements of a dtype of torch."""
    return np.dtype(f"<i{getattr(torch, dtype).itemsize}")


class Receiver:
    """The engine's side: tensors by Hugging Face name, and their version.

    Deltas are written into the tensors, so they have to be contiguous: DeltaError if one is not. A new receiver reads
    every tensor once, for its hash.
    """

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise DeltaError(f"{name} is not contiguous: it cannot be written in place")
        self._tensors, self._state = tensors, State.of(version, tensors.items())
        self._begun: tuple[int, str] | None = None

    @property
    def state(self) -> State:
        """Version and hashes of the tensors. Raises DeltaError while a delta is half applied."""
        if self._begun:
            raise DeltaError(f"between version {self._state.version} and {self._begun[0]}: {_AGAIN}")
        return self._state

    def apply(self, messages: Iterable[bytes], *, verify: bool = True, threads: int = 1) -> State:
        """Bring the tensors to the version of a delta; return their state.

        messages: a list, a `File`, or another iterable, whose messages are then kept in memory.
        verify: read every tensor that was written, and compare its hash.
        threads: how many work on the spans of a message, and on the tensors to verify, at once.

        Raises DeltaError before anything is written for a delta that is cut off, changed, of another base, or names
        other tensors, dtypes or shapes. If writing is interrupted, or `verify` finds other bytes, only the same delta
        is accepted afterwards: it holds new values, not differences, and may be applied twice.
        """
        kept = list(messages) if isinstance(messages, Iterator) else messages
        with ThreadPoolExecutor(threads) as pool:
            each: Each = pool.map if threads > 1 else map
            stays = isinstance(kept, Sequence) and all(isinstance(message, bytes) for message in kept)
            held: list[list[Span]] | None = [] if stays else None
            sums: list[int] = []
            after = self._check(kept, each, held, sums)
            self._begun = (after.version, after.hash)
            # Messages that are not in memory, but in a file, are read again.
            for spans in _all_spans(kept, sums) if held is None else held:
                deque(each(self._write, spans), maxlen=0)
            if verify:
                deque(each(self._verify, self._changed(after), itertools.repeat(after)), maxlen=0)
        self._state, self._begun = after, None
        return after

    def _check(self, messages: Iterable[bytes], each: Each, held: list[list[Span]] | None, sums: list[int]) -> State:
        """Read all of a delta; return the state after it. Raises DeltaError if it cannot be applied."""
        header, after = _checked(messages, self._state, each, held, sums)
        whole = (after.version, after.hash)
        if self._begun and whole != self._begun:
            raise DeltaError(f"version {self._begun[0]} is half applied: {_AGAIN}")
        if whole == (self._state.version, self._state.hash):
            return after
        if (header["base"], header["base_hash"]) != (self._state.version, self._state.hash):
            base = f"version {header['base']} ({header['base_hash']})"
            raise DeltaError(f"the delta's base is {base}, held is {self._state.version} ({self._state.hash})")
        return after

    def _write(self, span: Span) -> None:
        change = span.change()
        tensor = self._tensors[change.name].detach()
        end = change.start + (change.values.size if change.positions is None else tensor.numel())
        if tensor.is_cpu:
            flat = bits_of(change.name, tensor)[change.start : end]
            flat[... if change.positions is None else change.positions] = change.values
            return
        on_device = tensor.view(-1).view(BITS[tensor.dtype.itemsize])[change.start : end]
        values = torch.from_numpy(change.values.copy()).to(tensor.device)
        where = slice(None) if change.positions is None else torch.from_numpy(change.positions).to(tensor.device)
        on_device[where] = values

    def _changed(self, after: State) -> list[str]:
        """The names of the tensors that a delta has written; all of them, if it was applied before."""
        held, same = self._state, self._state == after
        return [name for name, one in after.tensors.items() if same or one.hash != held.tensors[name].hash]

    def _verify(self, name: str, after: State) -> None:
        found, expected = xxhash.xxh3_64_hexdigest(bits_of(name, self._tensors[name])), after.tensors[name].hash
        if found != expected:
            raise DeltaError(
                f"{name}: after version {after.version} was written its hash is {found}, expected {expected}: it was "
                f"not what version {self._state.version} is; {_AGAIN}"
            )


_AGAIN = "apply that delta again, or load the whole model into a new Receiver"


def check(messages: Iterable[bytes], state: State, each: Each = map) -> tuple[dict[str, Any], State]:
    """The header of a delta, and the state in which it leaves a receiver of `state`. Raises DeltaError as `apply` does.

    Bases are not compared: `Receiver.apply` does that.
    """
    return _checked(messages, state, each, None, [])


def _checked(
    messages: Iterable[bytes], state: State, each: Each, held: list[list[Span]] | None, sums: list[int]
) -> tuple[dict[str, Any], State]:
    """Do what `check` does, and add the spans of each message to `held`, if given, and its checksum to `sums`."""
    reader, hashes = Reader(), dict[str, str]()
    touched: dict[str, int] = {}
    ended: str | None = None
    for message in messages:
        if ended is not None:
            raise DeltaError(f"{len(message)} bytes after the end of the delta")
        fields, body = reader.open(message)
        sums.append(reader.sum)
        if fields["kind"] == "tensors":
            spans = list(_spans(fields, body, reader.header["zstd"]))
            for span in spans:
                _check_span(span.fields, state.tensors, touched)
            deque(each(Span.check, _unproved(spans, body)), maxlen=0)
            if held is not None:
                held.append(spans)
            if again := hashes.keys() & fields["hashes"].keys():
                raise DeltaError(f"{min(again)} has a hash twice")
            hashes |= fields["hashes"]
        elif fields["kind"] == "end":
            ended = _ended(fields, reader.count, hashes, touched)
    if ended is None:
        raise DeltaError(f"the delta is cut off after {reader.count} messages")
    after = state.after(reader.header["version"], hashes)
    known = (reader.header["base"], reader.header["base_hash"]) == (state.version, state.hash)
    if known and after.hash != ended:
        raise DeltaError(f"the hashes of version {after.version} give {after.hash}, the end says {ended}")
    return reader.header, after


def _unproved(spans: Sequence[Span], body: memoryview) -> list[Span]:
    """The spans that have yet to be checked one by one.

    Short indices are checked here, a thousand at a time: those of a thousand that passes are left out.
    """
    left = [span for span in spans if not span.short]
    short = [span for span in spans if span.short]
    for first in range(0, len(short), 1000):
        some = short[first : first + 1000]
        if not forms.short_indices(body, [(one.at, one.fields["changed"], one.fields["elements"]) for one in some]):
            left += some
    return left


def _ended(fields: dict[str, Any], count: int, hashes: dict[str, str], touched: dict[str, int]) -> str:
    """The hash in the message that ends a delta. Raises DeltaError if that does not fit the messages before it."""
    if fields["messages"] != count:
        raise DeltaError(f"{count} messages, the end says {fields['messages']}")
    if odd := sorted(hashes.keys() ^ touched.keys()):
        raise DeltaError(f"{odd[0]} has {'changes but no hash' if odd[0] in touched else 'a hash but no changes'}")
    return str(fields["hash"])


def _all_spans(messages: Iterable[bytes], sums: Sequence[int]) -> Iterator[list[Span]]:
    """The spans of each message of a delta that was accepted with these checksums."""
    reader = Reader()
    for message, checked in itertools.zip_longest(messages, sums, fillvalue=b""):
        fields, body = reader.open(message) if message else ({}, memoryview(b""))
        if not fields or reader.sum != checked:
            raise DeltaError(f"message {reader.count} is not the delta that was checked: was the file written since?")
        if fields["kind"] == "tensors":
            yield list(_spans(fields, body, reader.header["zstd"]))


def _spans(fields: dict[str, Any], body: memoryview, zstd: bool) -> Iterator[Span]:
    """The spans of one message, with their parts of the body."""
    at = 0
    for span in fields["spans"]:
        begin, at = at, at + sum(span["bytes"])
        if at > len(body):
            raise DeltaError(f"{span['name']}: its bytes end at {at}, the body at {len(body)}")
        yield Span(span, body, begin, zstd)
    if at != len(body):
        raise DeltaError(f"{len(body) - at} bytes of a body belong to no span")


def _check_span(span: dict[str, Any], known: Mapping[str, Fingerprint], touched: dict[str, int]) -> None:
    name, shape = span["name"], tuple(span["shape"])
    held = known.get(name)
    if held is None:
        raise DeltaError(f"{name}: the receiver has no such tensor")
    if (span["dtype"], shape) != held[:2]:
        raise DeltaError(f"{name} is {span['dtype']} {[*shape]}, the receiver's is {held.dtype} {[*held.shape]}")
    end = span["start"] + span["elements"]
    if not touched.get(name, 0) <= span["start"] < end <= prod(shape) or not 0 < span["changed"] <= span["elements"]:
        raise DeltaError(f"{name}: {span['changed']} changes from {span['start']} to {end} of {prod(shape)} elements")
    touched[name] = end
