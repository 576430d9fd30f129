"""Diagnosis by trial: says in a few words what happened to a tensor, by trying what usually happens to tensors.

Each trial re-creates one known mistake from the expected tensors and compares bytes; the first that fits is the answer.
The trials that need only the tensor itself come first, then those that look for its rows in the whole checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from moeref_conformance.compare import dtype_name, same
from moeref_conformance.matching import Context, lines_of, moved, moved_rows, octets, relation, runs, span


def diagnose(
    name: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    context: Context,
    stale: torch.Tensor | None = None,
) -> str:
    """One short phrase on what `got` is instead of `expected`.

    `stale` is what the tensor held before the last change. "no known pattern" if no trial fits.
    """
    expected, got = expected.detach().cpu(), got.detach().cpu()
    if expected.dtype != got.dtype:
        return _other_dtype(expected, got)
    if expected.shape != got.shape:
        return _other_shape(name, expected, got, context)
    trials: tuple[Callable[[], str], ...] = (
        lambda: _plain_values(expected, got),
        lambda: "stale: the values of before the change" if stale is not None and same(stale, got) else "",
        lambda: "equals its transpose" if expected.dim() == 2 and same(expected.T.contiguous(), got) else "",
        lambda: _another(name, got, context),
        lambda: _halves_swapped(expected, got),
        lambda: _shards_not_rechunked(name, expected, got, context),
        lambda: _groups_lost(name, expected, got, context),
        lambda: _blocks(expected, got),
        lambda: _mixed(name, expected, got, context, stale),
        lambda: _rounded(expected, got),
        lambda: _scaled(expected, got),
    )
    return next((found for trial in trials if (found := trial())), "no known pattern")


def _other_dtype(expected: torch.Tensor, got: torch.Tensor) -> str:
    want, have = dtype_name(expected.dtype), dtype_name(got.dtype)
    if expected.shape == got.shape:
        if torch.equal(expected.double(), got.double()):
            return f"the same values as {have} instead of {want}"
        if same(expected.to(got.dtype), got):
            return f"rounded from {want} to {have}"
    return f"{have} instead of {want}, with other values"


def _other_shape(name: str, expected: torch.Tensor, got: torch.Tensor, context: Context) -> str:
    if expected.dim() == 2 and same(expected.T.contiguous(), got):
        return "equals its transpose"
    if expected.numel() == got.numel() and same(expected.reshape(-1), got.reshape(-1)):
        return "the right elements in another shape"
    if expected.dim() == got.dim() and expected.shape[1:] == got.shape[1:]:
        n, m = expected.shape[0], got.shape[0]
        if m > n and same(expected, got[:n]):
            zero = " of zeros" if not got[n:].any() else ""
            return f"{m - n} rows{zero} appended (padding not trimmed)"
        if m < n:
            start = next((i for i in range(n - m + 1) if same(expected[i : i + m].contiguous(), got)), None)
            if start is not None:
                return f"short by {n - m} rows: only rows {span(start, m)} of {n}"
    if expected.dim() == got.dim() == 2 and expected.shape[0] == got.shape[0]:
        n, m = expected.shape[1], got.shape[1]
        start = next((i for i in range(n - m + 1) if same(expected[:, i : i + m].contiguous(), got)), None)
        if start is not None:
            return f"short by {n - m} columns: only columns {span(start, m)} of {n}"
    return _another(name, got, context) or moved_rows(name, got, context) or "no known pattern"


def _plain_values(expected: torch.Tensor, got: torch.Tensor) -> str:
    if got.numel() and not got.any():
        return "all zero"
    if got.is_floating_point():
        nan = int(got.isnan().sum())
        if nan == got.numel():
            return "all NaN"
        if nan > int(expected.isnan().sum()):
            return f"{nan} of {got.numel()} elements are NaN"
    return ""


def _another(name: str, got: torch.Tensor, context: Context) -> str:
    other = context.whole.get(octets(got))
    if other is None or other == name or context.tensors[other].shape != got.shape:
        return ""
    if _counterpart(name) == other:
        return "gate and up swapped"
    return f"is {relation(name, other, context.dense_prefix)}"


def _counterpart(name: str) -> str:
    for a, b in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
        if f".{a}." in name:
            return name.replace(f".{a}.", f".{b}.")
    return ""


def _halves_swapped(expected: torch.Tensor, got: torch.Tensor) -> str:
    for axis in range(max(0, expected.dim() - 2), expected.dim()):
        if expected.shape[axis] % 2 == 0:
            first, second = expected.chunk(2, dim=axis)
            if same(torch.cat([second, first], dim=axis), got):
                return "halves swapped (gate and up, if this is a fused tensor)"
    return ""


def _shards_not_rechunked(name: str, expected: torch.Tensor, got: torch.Tensor, context: Context) -> str:
    """TP shards of fc1, each [gate chunk | up chunk], concatenated and cut in the middle."""
    other = context.tensors.get(_counterpart(name))
    if other is None:
        return ""
    gate, up = (expected, other) if ".gate_proj." in name else (other, expected)
    for size in (2, 4, 8, 16):
        if gate.shape[0] % size == 0:
            shards = [x for pair in zip(gate.chunk(size), up.chunk(size), strict=True) for x in pair]
            halves = torch.cat(shards).chunk(2)
            if same(halves[0 if ".gate_proj." in name else 1], got):
                return f"TP shards concatenated without re-chunking gate and up (TP={size})"
    return ""


def _groups_lost(name: str, expected: torch.Tensor, got: torch.Tensor, context: Context) -> str:
    """The fused [q heads | k | v] per KV group read as all q, then all k, then all v."""
    match = re.search(r"\.([qkv])_proj\.", name)
    if match is None:
        return ""
    names = [name.replace(match[0], f".{x}_proj.") for x in "qkv"]
    if any(n not in context.tensors for n in names):
        return ""
    sizes = [context.tensors[n].shape[0] for n in names]
    for groups in range(2, sizes[1] + 1):
        if all(size % groups == 0 for size in sizes):
            parts = [context.tensors[n].chunk(groups) for n in names]
            fused = torch.cat([part[g] for g in range(groups) for part in parts])
            if same(torch.split(fused, sizes)["qkv".index(match[1])], got):
                return f"QKV read as [Q;K;V]: the interleave of {groups} KV groups is lost"
    return ""


def _blocks(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Right but for whole rows or columns that are zero or NaN, as when one shard is missing."""
    for axis, word in enumerate(("rows", "columns")[: expected.dim()]):
        want = lines_of(expected, bool(axis)) if expected.dim() > 1 else [octets(x) for x in expected]
        have = lines_of(got, bool(axis)) if expected.dim() > 1 else [octets(x) for x in got]
        flags = [a != b for a, b in zip(want, have, strict=True)]
        zero = bytes(len(have[0])) if have else b""
        if any(flags) and not all(flags) and all(h == zero for f, h in zip(flags, have, strict=True) if f):
            spans = ", ".join(span(*run) for run in runs(flags)[:3])
            return f"{word if expected.dim() > 1 else 'elements'} {spans} are zero: a shard is missing"
    return ""


def _mixed(name: str, expected: torch.Tensor, got: torch.Tensor, context: Context, stale: torch.Tensor | None) -> str:
    if expected.dim() < 2:
        return ""
    if stale is not None:
        want, have, old = lines_of(expected, False), lines_of(got, False), lines_of(stale, False)
        flags = [a != b for a, b in zip(want, have, strict=True)]
        if any(flags) and all(h == o for f, h, o in zip(flags, have, old, strict=True) if f):
            return f"rows {', '.join(span(*run) for run in runs(flags)[:3])} are stale"
    own = Context({name: expected})
    return moved(name, got, context, own, columns=False) or moved(name, got, context, own, columns=True)


def _rounded(expected: torch.Tensor, got: torch.Tensor) -> str:
    for dtype in (torch.bfloat16, torch.float16):
        if expected.dtype == torch.float32 and same(expected.to(dtype).float(), got):
            return f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}-rounded fp32"
    return ""


def _scaled(expected: torch.Tensor, got: torch.Tensor) -> str:
    if not expected.is_floating_point():
        return ""
    e, g = expected.double().flatten(), got.double().flatten()
    used = e != 0
    if bool(used.any()):
        ratio = g[used] / e[used]
        factor = float(ratio[0])
        if abs(factor - 1) > 1e-3 and bool((ratio - factor).abs().max() < 1e-4 * max(1e-6, abs(factor))):
            return f"is {factor:g} times the expected tensor"
    apart = float((e - g).abs().max())
    if apart < 1e-4 * float(e.abs().max()):
        return f"arithmetic, not movement: differs by at most {apart:.1e}"
    return ""
