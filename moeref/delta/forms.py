"""The four forms in which the changed elements of a span are written, and which of them is the smallest.

A span is a run of elements of one tensor; elements are integers of 1, 2, 4 or 8 bytes. All numbers are little-endian.

    index    u32 changes of each block of 65,536 elements | u16 positions in their blocks | values
    gaps     u8 gaps: unchanged elements before each change; 255 is 255 of them, then no change | values
    bitmask  a bit an element, least significant first | values
    full     every element, changed or not

Values are the new elements, not differences, so that writing them twice is harmless. With zstd each part is a frame,
and values are cut into one part for each byte of an element: exponents compress, low bytes do not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moeref.delta.changes import Changes, Positions
from moeref.delta.errors import DeltaError
from moeref.delta.state import Bits

if TYPE_CHECKING:
    import zstandard

Part = bytes | memoryview
FORMS = ("index", "gaps", "bitmask", "full")
BLOCK = 1 << 16
#: A byte below this is the whole rest of a gap, with a change after it.
SKIP = 255
#: Level of zstd. If 1 % changed, gaps shrink by 6 % at 1 and not at all below; 3 is slower and gives no less.
LEVEL = 1


def encode(changes: Changes) -> tuple[str, list[Part]]:
    """The smallest form without compression, found by arithmetic alone, and its parts."""
    new = changes.new
    form = smallest(new.size, new.itemsize, changes.count)
    if form == "full":
        return form, [_raw(new)]
    return form, [*_where(form, changes), _raw(changes.values)]


def smallest(elements: int, width: int, count: int) -> str:
    """The smallest of `index`, `bitmask` and `full` for `count` changes of `elements` of `width` bytes."""
    blocks = -(-elements // BLOCK)
    sizes = {
        "index": 4 * blocks + (2 + width) * count,
        "bitmask": -(-elements // 8) + width * count,
        "full": width * elements,
    }
    return min(sizes, key=sizes.__getitem__)


def encode_zstd(changes: Changes) -> tuple[str, list[Part]]:
    """The smallest form with zstd, and its parts. Where two forms may be the smallest, both are made."""
    density = changes.count / changes.new.size
    made: dict[str, list[Part]] = {}
    values = _planes(changes.values) if density <= 0.97 else []
    for form, low, high in (("gaps", 0.0, 0.3), ("bitmask", 0.03, 0.97)):
        if low <= density <= high:
            made[form] = [*(_compress(part) for part in _where(form, changes)), *values]
    if density >= 0.5:
        made["full"] = _planes(changes.new)
    form = min(made, key=lambda one: sum(map(len, made[one])))
    return form, made[form]


def _where(form: str, changes: Changes) -> Iterator[Part]:
    """The parts that say which elements changed."""
    if form == "index":
        yield _raw(_counts(changes))
        yield _raw(changes.positions.astype("<u2"))
    elif form == "gaps":
        yield _raw(_gaps(changes.positions))
    else:
        yield _raw(np.packbits(changes.mask, bitorder="little"))


def _counts(changes: Changes) -> npt.NDArray[np.uint32]:
    """The number of changes in each block."""
    if changes.new.size <= BLOCK:
        return np.array([changes.count], "<u4")
    # Ascending positions are cut where each block begins.
    cuts = np.searchsorted(changes.positions, np.arange(-(-changes.new.size // BLOCK) + 1) << 16)
    return (cuts[1:] - cuts[:-1]).astype("<u4")


def _gaps(positions: Positions) -> npt.NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1) - 1
    skips, rest = np.divmod(gaps, SKIP)
    written = np.full(positions.size + int(skips.sum()), SKIP, np.uint8)
    written[np.cumsum(skips) + np.arange(positions.size)] = rest
    return written


def check(form: str, parts: Sequence[Part], elements: int, dtype: np.dtype[Any], count: int) -> None:
    """Raise DeltaError unless the parts of a span without zstd are as `encode` writes them. Decodes no positions."""
    wanted = elements if form == "full" else count
    held = len(parts[-1]) / dtype.itemsize if parts else 0
    if len(parts) != (3 if form == "index" else 1 if form == "full" else 2) or held != wanted:
        raise DeltaError(f"{form} of {count} changes in {len(parts)} parts with {held:g} values")
    if form == "full":
        return
    positions, last = {"index": _check_index, "gaps": _check_gaps, "bitmask": _check_bitmask}[form](parts, elements)
    if positions != count or last >= elements:
        raise DeltaError(f"{form} gives {positions} positions for {count} changes of {elements} elements")


def decode(form: str, parts: Sequence[Part], elements: int, dtype: np.dtype[Any]) -> tuple[Positions | None, Bits]:
    """Positions (None: every element) and values of a span without zstd, which `check` has accepted."""
    values = _numbers(parts[-1], dtype)
    if form == "full":
        return None, values
    return {"index": _read_index, "gaps": _read_gaps, "bitmask": _read_bitmask}[form](parts, elements), values


def decode_short(body: Part, at: int, count: int, dtype: np.dtype[Any]) -> tuple[Positions, Bits]:
    """What `decode` gives for an index of one block whose parts begin at byte `at` of the body, in fewer calls."""
    inner = np.frombuffer(body, "<u2", count, at + 4)
    return inner.astype(np.int64), np.frombuffer(body, dtype, count, at + 4 + 2 * count)


def short_indices(body: Part, spans: Sequence[tuple[int, int, int]]) -> bool:
    """Whether `check` accepts these indices of one block each, all at once: calls of numpy outweigh few changes.

    spans: (its first byte in the body, an even one; changes; elements) of each index, ascending. Positions and values
    have 2 bytes each.
    """
    at, count, elements = np.array(spans, np.int64).T
    words = _numbers(body[at[0] : at[-1] + 4 + 4 * count[-1]], "<u2")
    begins, ends = (at - at[0]) // 2, np.cumsum(count)
    declared = words[begins] + (words[begins + 1].astype(np.int64) << 16)
    inner = words.take(np.arange(ends[-1]) + np.repeat(begins + 2 - (ends - count), count))
    ascends = inner[1:] > inner[:-1]
    ascends[ends[:-1] - 1] = True  # each block begins anew
    return bool((declared == count).all() and ascends.all() and (inner[ends - 1] < elements).all())


def _check_index(parts: Sequence[Part], elements: int) -> tuple[int, int]:
    """The number of positions of an index, and the last. Each `_check` raises DeltaError for parts not of its form."""
    counts, inner = _numbers(parts[0], "<u4"), _numbers(parts[1], "<u2")
    if counts.size != -(-elements // BLOCK) or int(counts.sum(dtype=np.int64)) != inner.size:
        raise DeltaError(f"an index of {counts.size} blocks and {inner.size} positions for {elements} elements")
    ascends = inner[1:] > inner[:-1]
    if counts.size > 1:
        begins = np.cumsum(counts, dtype=np.int64)[:-1]  # a block may begin anew
        ascends[begins[(begins > 0) & (begins < inner.size)] - 1] = True
    if not ascends.all():
        raise DeltaError("positions of an index do not ascend")
    # Only those of the last block may lie behind the end.
    return inner.size, (counts.size - 1) * BLOCK + int(inner[-1]) if counts[-1:].any() else 0


def _read_index(parts: Sequence[Part], elements: int) -> Positions:
    counts, inner = _numbers(parts[0], "<u4"), _numbers(parts[1], "<u2")
    if counts.size == 1:
        return inner.astype(np.int64)
    positions: Positions = np.repeat(np.arange(counts.size, dtype=np.int64) << 16, counts)
    positions += inner
    return positions


def _check_gaps(parts: Sequence[Part], elements: int) -> tuple[int, int]:
    written = np.frombuffer(parts[0], np.uint8)
    if written.size and written[-1] == SKIP:
        raise DeltaError("gaps end without a change")
    count = written.size - int(np.count_nonzero(written == SKIP))
    return count, int(written.sum(dtype=np.int64)) + count - 1


def _read_gaps(parts: Sequence[Part], elements: int) -> Positions:
    written = np.frombuffer(parts[0], np.uint8)
    ends: Positions = np.cumsum(written, dtype=np.int64)
    positions: Positions = ends.take((written != SKIP).nonzero()[0])
    positions += np.arange(positions.size)
    return positions


def _check_bitmask(parts: Sequence[Part], elements: int) -> tuple[int, int]:
    if len(parts[0]) != -(-elements // 8):
        raise DeltaError(f"a bitmask of {len(parts[0])} bytes for {elements} elements")
    number = int.from_bytes(parts[0], "little")
    return number.bit_count(), number.bit_length() - 1


def _read_bitmask(parts: Sequence[Part], elements: int) -> Positions:
    return np.flatnonzero(np.unpackbits(np.frombuffer(parts[0], np.uint8), bitorder="little"))


def sizes(form: str, elements: int, width: int, count: int, zstd: bool) -> list[tuple[int, int]]:
    """(least, most) bytes of each part, decompressed; with `zstd` values have one part for each byte of an element."""
    many = elements if form == "full" else count
    values = [(many, many)] * width if zstd else [(many * width,) * 2]
    where = {
        "index": [(4 * -(-elements // BLOCK),) * 2, (2 * count,) * 2],
        "gaps": [(count, count + elements // SKIP)],
        "bitmask": [(-(-elements // 8),) * 2],
        "full": [],
    }
    return [*where[form], *values]


def decompress(parts: Sequence[Part], bounds: Sequence[tuple[int, int]], width: int) -> list[Part]:
    """The parts without zstd, values in one part. Raises DeltaError for frames of other sizes, before unpacking."""
    import zstandard

    opened: list[Part] = []
    for part, (least, most) in zip(parts, bounds, strict=True):
        try:
            size = zstandard.frame_content_size(part)
            if not least <= size <= most:
                raise DeltaError(f"a zstd frame of {size} bytes, expected {least} to {most}")
            opened.append(_ZSTD.decompressor.decompress(part, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise DeltaError(f"not one zstd frame: {error}") from None
    planes = np.stack([np.frombuffer(plane, np.uint8) for plane in opened[-width:]], axis=1)
    return [*opened[:-width], _raw(planes)]


def _planes(values: Bits) -> list[Part]:
    """One compressed part for each byte of an element."""
    planes = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, values.itemsize)
    return [_compress(_raw(planes[:, byte])) for byte in range(values.itemsize)]


class _Zstd(threading.local):
    """Compressors that a thread keeps: making one takes ten times as long as compressing a short part."""

    @functools.cached_property
    def compressor(self) -> zstandard.ZstdCompressor:
        import zstandard

        return zstandard.ZstdCompressor(level=LEVEL)

    @functools.cached_property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        import zstandard

        return zstandard.ZstdDecompressor()


_ZSTD = _Zstd()


def _compress(part: Part) -> bytes:
    return _ZSTD.compressor.compress(part)


def _numbers(part: Part, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers of a part, copied where it begins at an odd byte: numpy is slow there."""
    numbers = np.frombuffer(part, dtype)
    return numbers if numbers.flags.aligned else numbers.copy()


def _raw(array: npt.NDArray[Any]) -> bytes:
    """The bytes, copied, as an array may be a view of memory that changes before the message is made."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
