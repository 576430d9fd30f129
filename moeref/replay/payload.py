"""The payload of routes: written strictly in one form that identifies itself, read back with every claim checked.

Layout, little-endian: magic `moeref-routes\\x01`, u32 length of the header, the header (JSON), then idx_TLK row by row,
then, only where not all rows are given or of one version, kind_T as u8 and versions_T as i32. With zstd these arrays
are one compressed frame; routes of independent tokens hardly compress, so it is off unless asked for.

No field is executed and nothing is unpickled. A reader allocates what the header declares only after holding it against
the bytes that are there and against `limit`.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from moeref.replay.routes import GIVEN, PAD, RouteError, Routes, index_dtype

MAGIC = b"moeref-routes\x01"
#: Largest payload that is read unless the caller says otherwise: a million tokens of 64 layers at top-8, uint16.
LIMIT = 1 << 30
#: A header is a few hundred bytes; its layer list grows it.
_HEADER_LIMIT = 1 << 20
#: No count in a header is as large; products of them are Python's, which do not overflow.
_MOST = 1 << 48
#: Bytes that stay in a core's cache between two looks at them.
_BLOCK = 1 << 18
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_FIELDS = {
    "tokens": int,
    "layers": list,
    "top_k": int,
    "experts": int,
    "dtype": str,
    "start": int,
    "version": int | None,
    "rows": str,
    "zstd": bool,
    "bytes": int,
}


def write(routes: Routes, *, zstd: bool = False) -> bytes:
    """`routes` as a payload. Raises RouteError for no layers, ImportError for `zstd=True` without zstandard."""
    if not routes.layers:
        raise RouteError("routes of no layers; a stage without MoE layers has none to send")
    version = int(routes.versions_T[0]) if routes.tokens else 0
    plain = bool((routes.kind_T == GIVEN).all()) and bool((routes.versions_T == version).all())
    parts = [_bytes(routes.idx_TLK)]
    if not plain:
        parts += [_bytes(routes.kind_T), _bytes(routes.versions_T.astype("<i4"))]
    size = sum(part.nbytes for part in parts)
    header = {
        "tokens": routes.tokens,
        "layers": list(routes.layers),
        "top_k": routes.top_k,
        "experts": routes.experts,
        "dtype": routes.idx_TLK.dtype.name,
        "start": routes.start,
        "version": version if plain else None,
        "rows": "given" if plain else "kinds",
        "zstd": zstd,
        "bytes": size,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    begin = MAGIC + struct.pack("<I", len(text)) + text
    if not zstd:
        return _written(begin, text, parts, size)
    import zstandard

    body = b"".join(parts)
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(text + body))
    return b"".join([begin, checksum, zstandard.ZstdCompressor(level=1).compress(body)])


def read(payload: bytes | bytearray | memoryview, *, limit: int = LIMIT) -> Routes:
    """The routes of a payload that `write` made; uncompressed arrays are views of `payload`, read-only and not copied.

    Raises RouteError for anything else: another magic, a header that is short, too long or not as written, sizes that
    disagree with the bytes there or exceed `limit`, a wrong checksum, an expert out of range, an unknown kind of row.
    """
    try:
        view = memoryview(payload).cast("B")
    except TypeError as error:
        raise RouteError(f"a routes payload is bytes, not {type(payload).__name__}: {error}") from None
    begin = len(MAGIC) + 4
    if len(view) < begin or bytes(view[: len(MAGIC)]) != MAGIC:
        raise RouteError(f"not a routes payload: it begins with {bytes(view[: len(MAGIC)])!r}, expected {MAGIC!r}")
    (length,) = struct.unpack("<I", view[len(MAGIC) : begin])
    if length > _HEADER_LIMIT or begin + length + 8 > len(view):
        raise RouteError(
            f"routes payload of {len(view)} bytes: a header of {length} bytes does not fit; is it cut off?"
        )
    text = bytes(view[begin : begin + length])
    header = _header(text)
    tokens, layers, top_k, experts = header["tokens"], header["layers"], header["top_k"], header["experts"]
    dtype = index_dtype(experts)
    if header["dtype"] != dtype.name:
        raise RouteError(
            f"routes payload: dtype {header['dtype']!r}, but {experts} experts are written as {dtype.name}"
        )
    count = tokens * len(layers) * top_k
    size = count * dtype.itemsize + (5 * tokens if header["rows"] == "kinds" else 0)
    if size != header["bytes"] or size > limit:
        raise RouteError(
            f"routes payload: [{tokens}, {len(layers)}, {top_k}] {dtype.name} are {size} bytes; the header says "
            f"{header['bytes']}, and {limit} are allowed (limit=)"
        )
    (declared,) = struct.unpack("<Q", view[begin + length : begin + length + 8])
    body = view[begin + length + 8 :]
    if header["zstd"]:
        body = memoryview(_decompressed(body, size))
    if len(body) != size:
        raise RouteError(f"routes payload: {len(body)} bytes of routes, {size} declared; is it cut off or joined?")
    little = dtype.newbyteorder("<")
    checksum, greatest = _scanned(text, body, count * dtype.itemsize, little)
    if checksum != declared:
        raise RouteError("routes payload: the checksum does not match; the bytes changed on the way")
    if greatest >= experts:
        raise RouteError(f"routes payload: expert {greatest} of {experts}")
    idx_TLK = np.frombuffer(body, little, count).reshape(tokens, len(layers), top_k)
    if header["rows"] == "given":
        kind_T = np.full(tokens, GIVEN, np.uint8)
        versions_T = np.full(tokens, header["version"], np.int32)
    else:
        rest = body[count * dtype.itemsize :]
        kind_T = np.frombuffer(rest, np.uint8, tokens)
        versions_T = np.frombuffer(rest, "<i4", tokens, tokens).astype(np.int32, copy=False)
        if tokens and int(kind_T.max()) > PAD:
            raise RouteError(f"routes payload: a row of kind {int(kind_T.max())}; there are 0 to {int(PAD)}")
    return Routes(idx_TLK, tuple(layers), experts, kind_T, versions_T, header["start"])


def _written(begin: bytes, text: bytes, parts: Sequence[memoryview], size: int) -> bytes:
    """`begin`, the checksum and the parts: copied and summed block by block, in one pass over memory.

    The checksum stands before what it sums, so the bytes are made first and filled after, as the C API has it: nobody
    else holds them yet.
    """
    content: bytes = _new_bytes(None, len(begin) + 8 + size)
    out = np.frombuffer((ctypes.c_ubyte * len(content)).from_address(_address(content)), np.uint8)
    digest, at = xxhash.xxh3_64(text), len(begin) + 8
    for part in parts:
        for first in range(0, part.nbytes, _BLOCK):
            block = np.frombuffer(part[first : first + _BLOCK], np.uint8)
            digest.update(block)
            out[at : at + block.size] = block
            at += block.size
    out[: len(begin) + 8] = np.frombuffer(begin + struct.pack("<Q", digest.intdigest()), np.uint8)
    return content


def _scanned(text: bytes, body: memoryview, size: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """`_checksum(text, body)`, and the greatest index in the first `size` bytes of `body`, in one pass over memory."""
    digest, greatest = xxhash.xxh3_64(text), -1
    for begin in range(0, size, _BLOCK):
        block = body[begin : min(begin + _BLOCK, size)]
        digest.update(block)
        greatest = max(greatest, int(np.frombuffer(block, dtype).max()))
    digest.update(body[size:])
    return digest.intdigest(), greatest


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(little.reshape(-1).view(np.uint8))


def _header(text: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RouteError(f"routes payload: the header is not JSON: {error}") from None
    if not isinstance(header, dict) or header.keys() != _FIELDS.keys():
        fields = sorted(header) if isinstance(header, dict) else type(header).__name__
        raise RouteError(f"routes payload: the header has {fields}, expected {sorted(_FIELDS)}")
    for name, kind in _FIELDS.items():
        value = header[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RouteError(f"routes payload: header field {name} is {value!r:.60}")
    layers = header["layers"]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < _MOST for i in layers):
        raise RouteError(f"routes payload: layers are numbers from 0, not {layers!r:.80}")
    if not layers or layers != sorted(set(layers)):
        raise RouteError(f"routes payload: layers are one or more, ascending, not {layers!r:.80}")
    for name, least in (("tokens", 0), ("top_k", 1), ("experts", 1), ("start", 0), ("bytes", 0)):
        if not least <= header[name] < _MOST:
            raise RouteError(f"routes payload: header field {name} is {header[name]}")
    if header["top_k"] > header["experts"]:
        raise RouteError(f"routes payload: top-k {header['top_k']} of {header['experts']} experts")
    if header["rows"] not in ("given", "kinds") or (header["rows"] == "given") == (header["version"] is None):
        raise RouteError(f"routes payload: rows {header['rows']!r} with version {header['version']}")
    if header["version"] is not None and not -(2**31) <= header["version"] < 2**31:
        raise RouteError(f"routes payload: version {header['version']} is not a 32-bit number")
    return header


def _decompressed(body: memoryview, size: int) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(bytes(body)) as stream:
            # One byte more than declared tells a frame that is longer, without unpacking all of it.
            content: bytes = stream.read(size + 1)
            return content
    except zstandard.ZstdError as error:
        raise RouteError(f"routes payload: not a zstd frame: {error}") from None
