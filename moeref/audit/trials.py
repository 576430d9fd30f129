"""Finds out what happened to tensors whose bytes differ by doing it to the expected ones: nothing is guessed.

Each trial takes the expected and the found tensors of one unit and gives a (kind, sentence), or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from moeref.audit import pieces
from moeref.audit.pieces import Cause
from moeref.torch_dtypes import bits_of, dtype_name


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, dtype and shape included."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits_of(a) == bits_of(b)).all())


def one(expected: torch.Tensor, found: torch.Tensor, fused: bool, stacked: bool = False) -> Cause | None:
    """What happened to one tensor; `fused`: it holds gate and up side by side; `stacked`: it holds many experts."""
    if expected.dtype != found.dtype:
        return _cast(expected, found)
    if stacked and (cause := pieces.experts(expected, found)):
        return cause
    if not permuted([expected], [found]):
        return pieces.alone(expected, found) or _rows(expected, found) or _rounded(expected, found)
    if expected.ndim >= 2 and equal(expected.transpose(-1, -2), found):
        return "transposed", "transposed: its last two dimensions are exchanged"
    if expected.shape != found.shape:
        return _rows(expected, found) or _wrong_dim(expected, found)
    cause = _fused(expected, found, range(int(stacked), expected.ndim)) if fused else None
    return cause or pieces.order(expected, found)


def permuted(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether the elements may be the same in another order: their bits have the same sum."""
    a, b = (sum(int(bits_of(tensor).sum(dtype="int64")) for tensor in side) for side in (expected, found))
    return a == b


def _cast(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    if expected.shape == found.shape and equal(expected.to(found.dtype), found):
        was, now = (dtype_name(t.dtype) for t in (expected, found))
        if equal(found.to(expected.dtype), expected):
            return "dtype", f"{now} instead of {was}, without loss"
        return "rounded", f"rounded from {was} to {now}"
    return None


def _rounded(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        narrower = expected.dtype.is_floating_point and dtype.itemsize < expected.dtype.itemsize
        if narrower and equal(expected.to(dtype).to(expected.dtype), found):
            return "rounded", f"rounded to {dtype_name(dtype)}, and stored as before"
    return None


def _rows(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    if not expected.ndim or expected.ndim != found.ndim or expected.shape[1:] != found.shape[1:]:
        return None
    have, want = len(found), len(expected)
    if not equal(found[: min(have, want)], expected[: min(have, want)]):
        return None
    if have < want:
        return "rows missing", f"its last {want - have} of {want} rows are missing"
    zero = "all zero" if not bool(bits_of(found[want:]).any()) else "not zero"
    return "padded rows", f"{have - want} rows more than {want}, {zero}: padding was not cut off"


def _wrong_dim(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    """The cause if shards of one dimension are joined along another; else None."""
    if expected.ndim != 2 or found.ndim != 2 or expected.numel() != found.numel() or not found.numel():
        return None
    for split, joined in ((1, 0), (0, 1)):
        parts, rest = divmod(found.shape[joined], expected.shape[joined])
        if parts > 1 and not rest and equal(torch.cat(expected.chunk(parts, split), joined), found):
            return "wrong dimension", f"{parts} shards of dimension {split} are joined along dimension {joined}"
    return None


def _fused(expected: torch.Tensor, found: torch.Tensor, dims: Iterable[int]) -> Cause | None:
    """What happened to gate and up in one tensor, along any even dimension of `dims`."""
    for dim in dims:
        if expected.shape[dim] % 2 == 0 and expected.shape[dim]:
            gate, up = expected.chunk(2, dim)
            if equal(torch.cat([up, gate], dim), found):
                return "gate and up", f"gate and up are exchanged along dimension {dim}"
            if cause := _unchunked([gate, up], found, dim):
                return cause
    return None


def _unchunked(parts: Sequence[torch.Tensor], found: torch.Tensor, dim: int = 0) -> Cause | None:
    """The cause if ranks' [gate | up] are joined where all of gate should come first, or the reverse; else None."""
    size = parts[0].shape[dim]
    for tp in _divisors(size):
        pieces = [part.chunk(tp, dim) for part in parts]
        joined = torch.cat([piece[rank] for rank in range(tp) for piece in pieces], dim)
        back = torch.cat([p for i in (0, 1) for p in torch.cat(list(parts), dim).chunk(2 * tp, dim)[i::2]], dim)
        if equal(joined, found) or equal(back, found):
            if tp == size:
                return "interleaved", f"gate and up alternate along dimension {dim} in one, and do not in the other"
            return (
                "unchunked shards",
                f"the shards of {tp} ranks are joined whole, each with its gate, then its up",
            )
    return None


def gate_up(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Cause | None:
    """What happened to a gate and an up projection together. If they are exchanged, hashes show it already."""
    if any(a.shape != expected[0].shape or a.dtype != expected[0].dtype for a in (*expected, *found)):
        return None
    if not permuted(expected, found):
        return None
    return _unchunked(expected, torch.cat(list(found)))


def qkv(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Cause | None:
    """What happened to q, k and v together."""
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(expected, found, strict=True)):
        return None
    if not permuted(expected, found):
        return None
    lengths = [len(part) for part in expected]
    given, have = torch.cat(list(expected)), torch.cat(list(found))
    for groups in _divisors(lengths[1]):
        if lengths[0] % groups or lengths[1] != lengths[2]:
            continue
        order = torch.cat(list(_by_group(lengths, groups)))
        if equal(given[order], have):
            return (
                "QKV",
                f"q, k and v are cut from Megatron's fused order, which goes by group ({groups} of them)",
            )
        if equal(given, have[order]):
            return "QKV", f"q, k and v are read as Megatron's fused order of {groups} groups, which they are not in"
    return None


def _by_group(lengths: Sequence[int], groups: int) -> Iterator[torch.Tensor]:
    """Rows of [q | k | v] in the order of Megatron's fused parameter: of each group its q, its k, its v."""
    starts = list(accumulate(lengths[:-1], initial=0))
    for group in range(groups):
        for start, length in zip(starts, lengths, strict=True):
            size = length // groups
            yield torch.arange(start + group * size, start + (group + 1) * size)


def _divisors(number: int) -> list[int]:
    """All divisors above 1, which would change nothing."""
    return [n for n in range(2, number + 1) if number % n == 0]


def difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """How many elements differ, the first of them in both, and which rows they are in."""
    a, b = bits_of(expected), bits_of(found)
    differs = a != b
    count, first = int(differs.sum()), int(differs.argmax())
    digits = 2 * a.itemsize
    mask = (1 << 8 * a.itemsize) - 1
    index, left = list[int](), first
    for size in reversed(expected.shape):
        left, at = divmod(left, size)
        index.insert(0, at)
    bits = f"{int(a[first]) & mask:#0{digits + 2}x} expected, {int(b[first]) & mask:#0{digits + 2}x} found"
    return f"{count} of {a.size} elements differ{_where(differs, found)}, first at {index}: {bits}"


def _where(differs: npt.NDArray[np.bool_], found: torch.Tensor) -> str:
    """The rows that differ, if not all do."""
    if found.ndim < 2:
        return ""
    rows = np.flatnonzero(differs.reshape(len(found), -1).any(1)).tolist()
    if len(rows) == len(found):
        return ""
    zero = "" if bool(bits_of(found[rows]).any()) else ", which are zero"
    return f" in rows {rows[0]} to {rows[-1]}{zero}"
