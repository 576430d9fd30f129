"""The routes payload: one self-describing byte format, written in one form and fully checked when read.

Layout, little-endian:

    magic    b"moeref-routes\\x01"
    u32      length of the header
    header   JSON, see `_FIELDS`
    u64      xxh3 of header and body
    body     idx_TLK row by row; then, only if rows differ in kind or weight version, kind_T (u8) and versions_T (i32);
             then, only if rows have holes in single layers, holes_TL (u8)

With zstd the body is one compressed frame. Routes of independent tokens hardly compress, so it is off by default.

Nothing is unpickled or executed. The reader compares every size in the header with the bytes present and with `limit`
before it allocates.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moeref.replay.routes import GIVEN, PAD, RouteError, Routes, check_distinct, index_dtype

MAGIC = b"moeref-routes\x01"
#: Default limit on the size of a body: a million tokens of 64 layers at top-8 in uint16.
LIMIT = 1 << 30
#: A header is a few hundred bytes plus its list of layers.
_HEADER_LIMIT = 1 << 20
#: No number in a header may reach this; numpy cannot overflow below it.
_MOST = 1 << 48
#: Block size of the read pass: small enough to stay in cache between the checksum and the range check.
_BLOCK = 1 << 18
#: A zstd frame's header has at most this many bytes (RFC 8878).
_FRAME_HEADER = 18
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
#: Bytes besides the experts, (of each row, of each route), by the header's `rows`.
_EXTRA = {"given": (0, 0), "kinds": (5, 0), "holes": (5, 1)}
#: Fields that are counts or positions, with the least value of each.
_LEAST = {"tokens": 0, "top_k": 1, "experts": 1, "start": 0, "bytes": 0}


def write(routes: Routes, *, zstd: bool = False) -> bytes:
    """Serialise `routes` of one sample.

    Raises RouteError for routes of no layers and for those of a batch, and for `zstd=True` without zstandard.
    """
    if not routes.layers:
        raise RouteError("routes of no layers; a stage without MoE layers has none to send")
    if routes.batch != 1:
        raise RouteError(f"rows of {routes.batch} samples in turn; write each sample on its own")
    version = int(routes.versions_T[0]) if routes.tokens else 0
    holes_TL = routes.holes_TL
    uniform = bool((routes.kind_T == GIVEN).all()) and bool((routes.versions_T == version).all()) and holes_TL is None
    body = [_little_endian(routes.idx_TLK)]
    if not uniform:
        body += [_little_endian(routes.kind_T), _little_endian(routes.versions_T.astype(np.int32, copy=False))]
    if holes_TL is not None:
        body.append(_little_endian(holes_TL))
    header = {
        "tokens": routes.tokens,
        "layers": list(routes.layers),
        "top_k": routes.top_k,
        "experts": routes.experts,
        "dtype": routes.idx_TLK.dtype.name,
        "start": routes.start,
        "version": version if uniform else None,
        "rows": "given" if uniform else "kinds" if holes_TL is None else "holes",
        "zstd": zstd,
        "bytes": sum(part.nbytes for part in body),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    digest = xxhash.xxh3_64(text)
    for part in body:
        digest.update(part)
    front = [MAGIC, struct.pack("<I", len(text)), text, struct.pack("<Q", digest.intdigest())]
    return b"".join([*front, _compressed(b"".join(body))] if zstd else [*front, *body])


def read(payload: bytes | bytearray | memoryview, *, limit: int = LIMIT, distinct: bool = True) -> Routes:
    """The routes of a payload made by `write`. Arrays of an uncompressed payload are read-only views of it.

    distinct: refuse an expert twice in a route. The look takes longer than all else here, and `replaying` looks too.

    Raises RouteError for anything else: wrong magic, a header that is cut off, too long or not as written, sizes that
    disagree with the bytes present or exceed `limit`, a wrong checksum, an expert out of range or twice in a route, an
    unknown row kind, bytes after a zstd frame, and for zstd without zstandard.
    """
    text, declared, body = _split(payload)
    header = _header(text)
    shape, dtype, size = _sizes(header, limit)
    if header["zstd"]:
        body = memoryview(_decompressed(body, size))
    if len(body) != size:
        raise RouteError(f"routes payload: {len(body)} bytes of routes, {size} declared; is it cut off or joined?")
    tokens, depth, top_k = shape
    indices = tokens * depth * top_k * dtype.itemsize
    checksum, greatest = _checksum_and_greatest(text, body, indices, dtype)
    if checksum != declared:
        raise RouteError("routes payload: the checksum does not match; the bytes changed on the way")
    if greatest >= header["experts"]:
        raise RouteError(f"routes payload: expert {greatest} of {header['experts']}")
    idx_TLK = np.frombuffer(body, dtype, tokens * depth * top_k).reshape(shape)
    kind_T, versions_T, holes_TL = _row_kinds(header, body[indices:])
    if distinct:
        check_distinct(idx_TLK, header["layers"], header["start"])
    layers, experts, start = tuple(header["layers"]), header["experts"], header["start"]
    return Routes(idx_TLK, layers, experts, kind_T, versions_T, start, holes_TL=holes_TL)


def _split(payload: bytes | bytearray | memoryview) -> tuple[bytes, int, memoryview]:
    """The header's text, the declared checksum and the body, which may be compressed."""
    try:
        view = memoryview(payload).cast("B")
    except TypeError as error:
        raise RouteError(f"a routes payload is bytes, not {type(payload).__name__}: {error}") from None
    begin = len(MAGIC) + 4
    if len(view) < begin or bytes(view[: len(MAGIC)]) != MAGIC:
        raise RouteError(f"not a routes payload: it begins with {bytes(view[: len(MAGIC)])!r}, expected {MAGIC!r}")
    (length,) = struct.unpack("<I", view[len(MAGIC) : begin])
    end = begin + length
    if length > _HEADER_LIMIT or end + 8 > len(view):
        raise RouteError(
            f"routes payload of {len(view)} bytes: a header of {length} bytes does not fit; is it cut off?"
        )
    (checksum,) = struct.unpack("<Q", view[end : end + 8])
    return bytes(view[begin:end]), checksum, view[end + 8 :]


def _header(text: bytes) -> Mapping[str, Any]:
    """The header, with every field of the right type and in range. Raises RouteError otherwise."""
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
    _check_layers(header["layers"])
    for name, least in _LEAST.items():
        if not least <= header[name] < _MOST:
            raise RouteError(f"routes payload: header field {name} is {header[name]}")
    if header["top_k"] > header["experts"]:
        raise RouteError(f"routes payload: top-k {header['top_k']} of {header['experts']} experts")
    rows, version = header["rows"], header["version"]
    if rows not in _EXTRA or (rows == "given") == (version is None):
        raise RouteError(f"routes payload: rows {rows!r} with version {version}")
    if version is not None and not -(2**31) <= version < 2**31:
        raise RouteError(f"routes payload: version {version} is not a 32-bit number")
    return header


def _check_layers(layers: list[Any]) -> None:
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < _MOST for i in layers):
        raise RouteError(f"routes payload: layers are numbers from 0, not {layers!r:.80}")
    if not layers or layers != sorted(set(layers)):
        raise RouteError(f"routes payload: layers are one or more, ascending, not {layers!r:.80}")


def _sizes(header: Mapping[str, Any], limit: int) -> tuple[tuple[int, int, int], np.dtype[Any], int]:
    """The shape [T, L, K], the dtype of the indices and the bytes of the body. Raises RouteError over `limit`."""
    dtype = index_dtype(header["experts"])
    if header["dtype"] != dtype.name:
        raise RouteError(
            f"routes payload: dtype {header['dtype']!r}, but {header['experts']} experts are written as {dtype.name}"
        )
    shape = tokens, depth, top_k = header["tokens"], len(header["layers"]), header["top_k"]
    per_row, per_route = _EXTRA[header["rows"]]
    size = tokens * (depth * (top_k * dtype.itemsize + per_route) + per_row)
    if size != header["bytes"] or size > limit:
        raise RouteError(
            f"routes payload: [{tokens}, {depth}, {top_k}] {dtype.name} are {size} bytes; the header says "
            f"{header['bytes']}, and {limit} are allowed (limit=)"
        )
    return shape, dtype.newbyteorder("<"), size


def _row_kinds(
    header: Mapping[str, Any], rest: memoryview
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], npt.NDArray[np.bool_] | None]:
    """kind_T, versions_T and holes_TL: from the header if all rows are alike, else from the `rest` of the body."""
    tokens, depth = header["tokens"], len(header["layers"])
    if header["rows"] == "given":
        return np.full(tokens, GIVEN, np.uint8), np.full(tokens, header["version"], np.int32), None
    kind_T = np.frombuffer(rest, np.uint8, tokens)
    if tokens and int(kind_T.max()) > PAD:
        raise RouteError(f"routes payload: a row of kind {int(kind_T.max())}; there are 0 to {int(PAD)}")
    holes_TL = None
    if header["rows"] == "holes":
        flags_TL = np.frombuffer(rest, np.uint8, tokens * depth, 5 * tokens).reshape(tokens, depth)
        if flags_TL.size and int(flags_TL.max()) > 1:
            raise RouteError(f"routes payload: a hole of {int(flags_TL.max())}; there are 0 and 1")
        holes_TL = flags_TL.astype(np.bool_)
    return kind_T, np.frombuffer(rest, "<i4", tokens, tokens).astype(np.int32, copy=False), holes_TL


def _checksum_and_greatest(text: bytes, body: memoryview, indices: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """The checksum of header and body, and the greatest index in the first `indices` bytes; memory is read once."""
    digest, greatest = xxhash.xxh3_64(text), -1
    for begin in range(0, indices, _BLOCK):
        block = body[begin : min(begin + _BLOCK, indices)]
        digest.update(block)
        greatest = max(greatest, int(np.frombuffer(block, dtype).max()))
    digest.update(body[indices:])
    return digest.intdigest(), greatest


def _little_endian(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of `array`, without a copy where it is contiguous and the machine little-endian."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(little.reshape(-1).view(np.uint8))


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise RouteError("a routes payload in zstd needs the package zstandard: pip install 'moeref[zstd]'") from None
    return zstandard


def _compressed(body: bytes) -> bytes:
    return bytes(_zstandard().ZstdCompressor(level=1).compress(body))


def _decompressed(body: memoryview, size: int) -> bytes:
    """The content of the one zstd frame that `body` is. Raises RouteError unless it has `size` bytes."""
    zstandard = _zstandard()
    try:
        declared = zstandard.frame_content_size(bytes(body[:_FRAME_HEADER]))
        if declared != size:
            raise RouteError(f"routes payload: {declared} bytes of routes, {size} declared; is it cut off or joined?")
        return bytes(zstandard.ZstdDecompressor().decompress(bytes(body), allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise RouteError(f"routes payload: not one zstd frame: {error}") from None
