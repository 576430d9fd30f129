"""Trials on shape and axes: transposed, read in the wrong storage order, joined or split along the wrong axis."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from moeref_conformance.diagnosis.compare import same
from moeref_conformance.diagnosis.matching import span

SIZES = (2, 4, 8, 16)
#: More parts than the ranks of any cell are no shards.
_RANKS = 8
#: Names of tensors that hold gate and up.
_HALVES = re.compile(r"linear_fc1|gate_up_proj")


def transposed(expected: torch.Tensor, got: torch.Tensor) -> str:
    """The last two axes swapped, whatever the shape says."""
    if expected.dim() < 2:
        return ""
    swapped = expected.transpose(-1, -2).contiguous()
    which = "" if expected.dim() == 2 else " (last two dimensions swapped)"
    if same(swapped, got):
        return f"equals its transpose{which}"
    if swapped.numel() == got.numel() and same(swapped.reshape(-1), got.reshape(-1)):
        return f"its elements are in the storage order of its transpose{which}: a strided tensor was read flat"
    for dim in range(expected.dim()):
        for size in SIZES:
            if expected.dim() == 2 and expected.shape[dim] % size == 0 and expected.shape == got.shape:
                shards = [x.T.contiguous().reshape(x.shape) for x in expected.chunk(size, dim)]
                if same(torch.cat(shards, dim), got):
                    return (
                        f"the elements of each of {size} shards of dim {dim} are in the storage order of its "
                        "transpose: a strided tensor was read flat"
                    )
    return ""


def reshaped(expected: torch.Tensor, got: torch.Tensor) -> str:
    """The right elements in the right order."""
    if expected.numel() == got.numel() and same(expected.reshape(-1), got.reshape(-1)):
        return "the right elements in another shape"
    return ""


def joined_elsewhere(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Shards of one axis joined along another."""
    if expected.dim() != got.dim() or expected.numel() != got.numel():
        return ""
    for cut in range(expected.dim()):
        for join in range(expected.dim()):
            size = got.shape[join] // max(1, expected.shape[join])
            if cut == join or size < 2 or expected.shape[cut] % size:
                continue
            if same(torch.cat(expected.chunk(size, cut), join), got):
                return f"{size} TP or ETP shards of dim {cut} concatenated on dim {join}"
    return ""


def longer_or_shorter(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Right, but with rows appended, or with rows or columns missing."""
    if expected.dim() != got.dim():
        return ""
    for dim, word in ((0, "rows"), (1, "columns")) if expected.dim() == 2 else ((0, "rows"),):
        n, m = expected.shape[dim], got.shape[dim]
        if expected.shape[:dim] + expected.shape[dim + 1 :] != got.shape[:dim] + got.shape[dim + 1 :]:
            continue
        if dim == 0 and m > n and same(expected, got[:n]):
            zero = " of zeros" if not got[n:].any() else ""
            return f"{m - n} rows{zero} appended (padding not trimmed)"
        start = next((i for i in range(n - m + 1) if same(expected.narrow(dim, i, m), got)), None)
        if start is not None:
            return f"short by {n - m} {word}: only {word} {span(start, m)} of {n}"
    return ""


def shards_reordered(name: str, expected: torch.Tensor, got: torch.Tensor) -> str:
    """Equal parts in another order: the halves of a fused tensor, or the shards of a gather."""
    for dim in range(expected.dim()):
        for size in SIZES:
            if expected.shape[dim] % size or expected.shape[dim] == size:
                continue
            parts, have = expected.chunk(size, dim), got.chunk(size, dim)
            order = _order(parts, have)
            if order is None:
                continue
            if size == 2 and dim == expected.dim() - 2 and order == [1, 0] and _HALVES.search(name):
                return "halves swapped: up before gate"
            listed, every = ", ".join(map(str, order)), sorted(order) == list(range(size))
            what = "TP or ETP shards" if size <= _RANKS else f"{size} equal parts"
            return f"{what} of dim {dim} {'in the order' if every else 'are'} {listed}"
    return ""


def _order(parts: Sequence[torch.Tensor], have: Sequence[torch.Tensor]) -> list[int] | None:
    """The index in `parts` of each of `have`; None if one is not among them."""
    order = []
    for piece in have:
        at = next((i for i, part in enumerate(parts) if same(part, piece)), None)
        if at is None:
            return None
        order.append(at)
    return order
