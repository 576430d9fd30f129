"""The messages of a delta: one header, any number with spans of tensors, one end. Numbers are little-endian.

    magic      b"moerefD1"
    u32, u64   bytes of the description and of the body
    description  JSON as in schema.json; compressed with zstd where the header says so, except the header's own
    body       the parts of all spans, one after the other
    u64        XXH3 of all bytes before it, seeded with this number of the message before (0 for the header)

So a message that is changed, left out, repeated or taken from another delta is an error. A file is the messages one
after another.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from moeref.delta.errors import DeltaError
from moeref.delta.forms import FORMS, Part

MAGIC = b"moerefD1"
FORMAT = 1
_FRONT = struct.Struct("<8sIQ")
_SUM = struct.Struct("<Q")
#: No description is longer, decompressed; a span takes some 200 bytes.
LONGEST = 1 << 28

#: Fields of each kind of message and of a span, with their types; `schema.json` says the same.
FIELDS: dict[str, dict[str, Any]] = {
    "header": {"kind": str, "format": int, "version": int, "base": int, "base_hash": str, "zstd": bool},
    "tensors": {"kind": str, "spans": list, "hashes": dict},
    "end": {"kind": str, "messages": int, "hash": str},
    "span": {
        "name": str,
        "dtype": str,
        "shape": list,
        "start": int,
        "elements": int,
        "form": str,
        "changed": int,
        "bytes": list,
    },
}
_HEXADECIMAL = re.compile("[0-9a-f]*")
#: Fields that hold hashes, with their hexadecimal digits.
_DIGITS = {"base_hash": 32, "hash": 32}


class Writer:
    """Makes messages. The checksum of each has that of the one before it as its seed."""

    def __init__(self, *, zstd: bool) -> None:
        self._zstd, self._sum, self.count = zstd, 0, 0

    def message(self, described: dict[str, Any], body: Iterable[Part] = ()) -> bytes:
        """One message as bytes."""
        text = json.dumps(described, separators=(",", ":")).encode()
        if self._zstd and self.count:
            import zstandard

            text = zstandard.ZstdCompressor(level=3).compress(text)
        parts = [text, *body]
        parts.insert(0, _FRONT.pack(MAGIC, len(text), sum(map(len, parts)) - len(text)))
        digest = xxhash.xxh3_64(seed=self._sum)
        for part in parts:
            digest.update(part)
        self._sum = digest.intdigest()
        self.count += 1
        return b"".join([*parts, _SUM.pack(self._sum)])


class Reader:
    """Opens messages in order. Every way in which bytes can be wrong raises DeltaError.

    sum: the checksum of the last message, which depends on all messages before it.
    """

    def __init__(self) -> None:
        self.sum, self.count, self.header = 0, 0, dict[str, Any]()

    def open(self, message: Part) -> tuple[dict[str, Any], memoryview]:
        """Description and body of the next message."""
        view, where = memoryview(message).cast("B"), f"message {self.count} of the delta"
        if len(view) < _FRONT.size + _SUM.size:
            raise DeltaError(f"{where}: {len(view)} bytes are no message; is it cut off?")
        magic, described, body = _FRONT.unpack(view[: _FRONT.size])
        if magic != MAGIC or _FRONT.size + described + body + _SUM.size != len(view):
            raise DeltaError(f"{where}: {len(view)} bytes are no message, or cut off, or joined to others")
        (declared,) = _SUM.unpack(view[-_SUM.size :])
        self.sum = xxhash.xxh3_64_intdigest(view[: -_SUM.size], self.sum)
        if self.sum != declared:
            raise DeltaError(f"{where}: the checksum is wrong: bytes changed, or a message before it is not its own")
        begin = _FRONT.size
        fields = self._described(view[begin : begin + described], where)
        self.count += 1
        return fields, view[begin + described : -_SUM.size]

    def _described(self, text: memoryview, where: str) -> dict[str, Any]:
        raw = _unpacked(text, where) if self.header.get("zstd") else bytes(text)
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise DeltaError(f"{where}: its description is not JSON: {error}") from None
        kind = fields.get("kind") if isinstance(fields, dict) else None
        if (kind == "header") != (self.count == 0) or kind not in ("header", "tensors", "end"):
            raise DeltaError(f"{where}: of kind {kind!r:.40}; a delta is a header, tensors and an end")
        check_fields(fields, kind, where)
        if kind == "header":
            if fields["format"] != FORMAT:
                raise DeltaError(f"{where}: format {fields['format']}; this reads {FORMAT}")
            self.header = fields
        return dict(fields)


def check_fields(fields: Any, kind: str, where: str) -> None:
    """Raise DeltaError unless `fields` are those of `kind`, with values of the right types and in range."""
    wanted = FIELDS[kind]
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        raise DeltaError(f"{where}: {kind} has the fields {fields!r:.200}, expected {', '.join(wanted)}")
    for name, value in fields.items():
        if type(value) is not wanted[name] or (type(value) is int and not 0 <= value < 1 << 63):
            raise DeltaError(f"{where}: {kind} has {name}={value!r:.60}")
        if name in _DIGITS and not is_hash(value, _DIGITS[name]):
            raise DeltaError(f"{where}: {kind} has {name}={value!r:.60}, expected {_DIGITS[name]} hexadecimal digits")
    if kind == "tensors":
        for span in fields["spans"]:
            check_fields(span, "span", where)
        if not all(is_hash(value, 16) for value in fields["hashes"].values()):
            raise DeltaError(f"{where}: a hash of a tensor is not 16 hexadecimal digits")
    if kind == "span":
        numbers = [*fields["shape"], *fields["bytes"]]
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers) or fields["form"] not in FORMS:
            raise DeltaError(f"{where}: {fields['name']}: shape, bytes or form of a span: {fields!r:.200}")


def is_hash(value: Any, digits: int) -> bool:
    """Whether `value` is that many lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == digits and _HEXADECIMAL.fullmatch(value) is not None


def _unpacked(text: memoryview, where: str) -> bytes:
    import zstandard

    try:
        size = zstandard.frame_content_size(text)
        if not 0 <= size <= LONGEST:
            raise DeltaError(f"{where}: a description of {size} bytes; {LONGEST} are allowed")
        return bytes(zstandard.ZstdDecompressor().decompress(text, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise DeltaError(f"{where}: its description is not one zstd frame: {error}") from None


def save(path: str | Path, messages: Iterable[bytes]) -> None:
    """Write a delta to a file. Its name appears once all of it is on disk."""
    target = Path(path)
    half = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with half.open("wb") as file:
            file.writelines(messages)
            file.flush()
            os.fsync(file.fileno())
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


class File:
    """The messages of a file, one in memory at a time; it can be iterated over again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[bytes]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            while front := file.read(_FRONT.size):
                if len(front) < _FRONT.size or front[:8] != MAGIC:
                    raise DeltaError(f"{self.path}: no message at byte {file.tell() - len(front)}; is it cut off?")
                _, described, body = _FRONT.unpack(front)
                rest = described + body + _SUM.size
                if file.tell() + rest > size:
                    raise DeltaError(f"{self.path}: cut off: a message of {rest} bytes at {file.tell()} of {size}")
                yield front + file.read(rest)
