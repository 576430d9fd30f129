"""The four forms in which the changed elements of a span are written, and which of them is the smallest.

A span is a run of elements of one tensor; elements are integers of 1, 2, 4 or 8 bytes. All numbers are little-endian.

    index    u32 changes of each block of 65,536 elements | u16 positions in their blocks | values
    gaps     u8 gaps: unchanged elements before each change, where 255 is 255 of them and no change | values
    bitmask  a bit an element, least significant first | values
    full     every element, changed or not

Values are the new elements, not differences, so that writing them twice is harmless. With zstd each part is a frame,
and values are cut into one part for each byte of an element: exponents compress, low bytes do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moeref.delta.errors import DeltaError
from moeref.delta.state import Bits

Positions = npt.NDArray[np.int64]
Part = bytes | memoryview
FORMS = ("index", "gaps", "bitmask", "full")
BLOCK = 1 << 16
#: A gap that stands for itself is less than this.
SKIP = 255
#: Level of zstd. Gaps of 1 % shrink by 6 % at 1 and by nothing below; 3 is slower and no smaller.
LEVEL = 1


def find(mask: npt.NDArray[np.bool_], count: int) -> Positions:
    """Where `mask` is true, ascending; `count` of them. Where few are, words of 8 are looked at first."""
    whole = mask.size - mask.size % 8
    if count * 16 > mask.size or not whole:
        return np.flatnonzero(mask)
    words = mask[:whole].view(np.uint64)
    hit = np.flatnonzero(words != 0)
    inner = np.flatnonzero(words.take(hit).view(np.bool_))
    found = (hit.take(inner >> 3) << 3) + (inner & 7)
    return np.concatenate([found, np.flatnonzero(mask[whole:]) + whole]) if whole < mask.size else found


def encode(new: Bits, mask: npt.NDArray[np.bool_], count: int) -> tuple[str, list[Part]]:
    """The smallest form without compression, by arithmetic alone, and its parts."""
    form = smallest(new.size, new.itemsize, count)
    if form == "full":
        return form, [_raw(new)]
    positions = find(mask, count)
    return form, [*_where(form, mask, positions), _raw(new.take(positions))]


def smallest(elements: int, width: int, count: int) -> str:
    """The smallest of `index`, `bitmask` and `full` for `count` changes of `elements` of `width` bytes."""
    blocks = -(-elements // BLOCK)
    sizes = {
        "index": 4 * blocks + (2 + width) * count,
        "bitmask": -(-elements // 8) + width * count,
        "full": width * elements,
    }
    return min(sizes, key=lambda form: sizes[form])


def encode_zstd(new: Bits, mask: npt.NDArray[np.bool_], count: int) -> tuple[str, list[Part]]:
    """The smallest form with zstd: where two may be, both are made."""
    positions, density = find(mask, count), count / new.size
    made: dict[str, list[Part]] = {}
    values = _planes(new.take(positions)) if density <= 0.97 else []
    for form, low, high in (("gaps", 0.0, 0.3), ("bitmask", 0.03, 0.97)):
        if low <= density <= high:
            made[form] = [*(_compress(part) for part in _where(form, mask, positions)), *values]
    if density >= 0.5:
        made["full"] = _planes(new)
    form = min(made, key=lambda one: sum(map(len, made[one])))
    return form, made[form]


def _where(form: str, mask: npt.NDArray[np.bool_], positions: Positions) -> Iterator[Part]:
    """The parts that say which elements changed."""
    if form == "index":
        yield _raw(np.bincount(positions >> 16, minlength=-(-mask.size // BLOCK)).astype("<u4"))
        yield _raw(positions.astype("<u2"))
    elif form == "gaps":
        yield _raw(_gaps(positions))
    else:
        yield _raw(np.packbits(mask, bitorder="little"))


def _gaps(positions: Positions) -> npt.NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1) - 1
    skips, rest = np.divmod(gaps, SKIP)
    written = np.full(positions.size + int(skips.sum()), SKIP, np.uint8)
    written[np.cumsum(skips) + np.arange(positions.size)] = rest
    return written


def decode(
    form: str, parts: Sequence[Part], elements: int, dtype: np.dtype[Any], count: int
) -> tuple[Positions | None, Bits]:
    """Positions (None: all) and values of a span without zstd. Raises DeltaError unless they are as `encode` writes."""
    values = np.frombuffer(parts[-1], dtype.newbyteorder("<"))
    if not values.flags.aligned:  # parts begin at any byte, where numpy is slow
        values = values.copy()
    wanted = elements if form == "full" else count
    if len(parts) != (3 if form == "index" else 1 if form == "full" else 2) or values.size != wanted:
        raise DeltaError(f"{form} of {count} changes in {len(parts)} parts with {values.size} values")
    if form == "full":
        return None, values
    read = {"index": _read_index, "gaps": _read_gaps, "bitmask": _read_bitmask}[form]
    positions = read(parts, elements)
    # Gaps and bits ascend by themselves. Positions below 0 there are none: all are sums of unsigned numbers.
    if positions.size != count or (count and int(positions[-1]) >= elements):
        raise DeltaError(f"{form} gives {positions.size} positions for {count} changes of {elements} elements")
    if form == "index" and not bool((positions[1:] > positions[:-1]).all()):
        raise DeltaError("positions of an index do not ascend")
    return positions, values


def _read_index(parts: Sequence[Part], elements: int) -> Positions:
    counts, inner = np.frombuffer(parts[0], "<u4"), np.frombuffer(parts[1], "<u2")
    if counts.size != -(-elements // BLOCK) or int(counts.sum(dtype=np.int64)) != inner.size:
        raise DeltaError(f"an index of {counts.size} blocks and {inner.size} positions for {elements} elements")
    positions: Positions = np.repeat(np.arange(counts.size, dtype=np.int64) << 16, counts) + inner
    return positions


def _read_gaps(parts: Sequence[Part], elements: int) -> Positions:
    written = np.frombuffer(parts[0], np.uint8)
    change = written != SKIP
    if written.size and not change[-1]:
        raise DeltaError("gaps end without a change")
    positions: Positions = (np.cumsum(written, dtype=np.int64) + np.cumsum(change) - 1)[change]
    return positions


def _read_bitmask(parts: Sequence[Part], elements: int) -> Positions:
    packed = np.frombuffer(parts[0], np.uint8)
    if packed.size != -(-elements // 8):
        raise DeltaError(f"a bitmask of {packed.size} bytes for {elements} elements")
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))


def sizes(form: str, elements: int, width: int, count: int, zstd: bool) -> list[tuple[int, int]]:
    """Least and greatest bytes of each part, decompressed; with `zstd` the values are one part a byte of an element."""
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
    """The parts without zstd, values in one. Raises DeltaError for frames of other sizes, before they are unpacked."""
    import zstandard

    opened: list[Part] = []
    for part, (least, most) in zip(parts, bounds, strict=True):
        try:
            size = zstandard.frame_content_size(part)
            if not least <= size <= most:
                raise DeltaError(f"a zstd frame of {size} bytes, expected {least} to {most}")
            opened.append(zstandard.ZstdDecompressor().decompress(part, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise DeltaError(f"not one zstd frame: {error}") from None
    planes = np.stack([np.frombuffer(plane, np.uint8) for plane in opened[-width:]], axis=1)
    return [*opened[:-width], _raw(planes)]


def _planes(values: Bits) -> list[Part]:
    """One compressed part for each byte of an element."""
    planes = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, values.itemsize)
    return [_compress(_raw(planes[:, byte])) for byte in range(values.itemsize)]


def _compress(part: Part) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=LEVEL).compress(part))


def _raw(array: npt.NDArray[Any]) -> memoryview:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(little.reshape(-1).view(np.uint8))
