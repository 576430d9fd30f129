"""Trials on the values alone: constant, stale, rounded, scaled, of another dtype, or of no checkpoint at all."""

from __future__ import annotations

import torch

from moeref_conformance.diagnosis.compare import bits, dtype_name, same
from moeref_conformance.diagnosis.matching import Candidates, lines_of, runs, span, zeros_of


def other_dtype(expected: torch.Tensor, got: torch.Tensor) -> str:
    """What the change of dtype did to the values."""
    want, have = dtype_name(expected.dtype), dtype_name(got.dtype)
    if expected.shape == got.shape:
        if torch.equal(expected.double(), got.double()):
            return f"the same values as {have} instead of {want}"
        if same(expected.to(got.dtype), got):
            return f"rounded from {want} to {have}"
    return f"{have} instead of {want}, with other values"


def constant(expected: torch.Tensor, got: torch.Tensor) -> str:
    """All elements alike, or some NaN."""
    if got.numel() and not got.any():
        return "all zero"
    if got.is_floating_point():
        nan = int(got.isnan().sum())
        if nan == got.numel():
            return "all NaN"
        if nan > int(expected.isnan().sum()):
            return f"{nan} of {got.numel()} elements are NaN"
    if got.numel() > 1 and bool((got == got.reshape(-1)[0]).all()):
        return f"all elements are {got.reshape(-1)[0].item():g}: an initial value, never loaded"
    return ""


def stale_values(expected: torch.Tensor, got: torch.Tensor, stale: torch.Tensor | None) -> str:
    """`got` has, in all rows or some, the values from before the last change."""
    if stale is None:
        return ""
    if same(stale, got):
        return "stale: the values of before the change"
    if expected.dim() < 2 or expected.shape != got.shape:
        return ""
    want, have, old = lines_of(expected, False), lines_of(got, False), lines_of(stale, False)
    flags = [a != b for a, b in zip(want, have, strict=True)]
    if any(flags) and all(h == o for f, h, o in zip(flags, have, old, strict=True) if f):
        return f"rows {', '.join(span(*run) for run in runs(flags)[:3])} are stale"
    return ""


def missing_lines(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Right, but with whole rows or columns of zeros, as if one shard is missing."""
    for word in ("rows", "columns") if expected.dim() > 1 else ("elements",) * expected.dim():
        columns = word != "rows"  # a vector is a row
        flags = [a != b for a, b in zip(lines_of(expected, columns), lines_of(got, columns), strict=True)]
        zeros = zeros_of(got, columns)
        if any(flags) and not all(flags) and all(zero for f, zero in zip(flags, zeros, strict=True) if f):
            gaps = runs(flags)
            spans = ", ".join(span(*gap) for gap in gaps[:3])
            which = _which_shard(gaps, len(flags))
            return f"{word} {spans} are zero: {which} is missing"
    return ""


def _which_shard(gaps: list[tuple[int, int]], lines: int) -> str:
    """`shard 1 of 2` for a gap that is one of several equal parts."""
    start, count = gaps[0]
    if len(gaps) == 1 and count > 1 and lines % count == 0 and start % count == 0:
        return f"shard {start // count} of {lines // count}"
    return "a shard"


def rounded(expected: torch.Tensor, got: torch.Tensor) -> str:
    """fp32 values rounded to a shorter dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        if expected.dtype == torch.float32 and same(expected.to(dtype).float(), got):
            return f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}-rounded fp32"
    return ""


def scaled(expected: torch.Tensor, got: torch.Tensor) -> str:
    """A multiple, or nearly the same numbers."""
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
    last_digit = bool(((e - g).abs() <= torch.finfo(expected.dtype).eps * e.abs()).all())
    if last_digit or apart < 1e-4 * float(e.abs().max()):
        return f"arithmetic, not movement: differs by at most {apart:.1e}"
    return ""


def scaled_by_block(expected: torch.Tensor, got: torch.Tensor) -> str:
    """A factor for each block of rows and columns: nearly all neighbours share theirs, in both directions."""
    return _scaled_by(expected, got, (0, 1), "blocks of it")


def scaled_by_run(expected: torch.Tensor, got: torch.Tensor) -> str:
    """A factor for each run of columns of a row, or of rows of a column: nearly all neighbours there share theirs."""
    return _scaled_by(expected, got, (1,), "runs of its rows") or _scaled_by(expected, got, (0,), "runs of its columns")


def _scaled_by(expected: torch.Tensor, got: torch.Tensor, along: tuple[int, ...], what: str) -> str:
    if expected.dim() != 2 or not expected.is_floating_point():
        return ""
    ratio = got.double() / expected.double()
    used = expected != 0
    if not bool(used.any()) or bool(got[~used].any()) or not bool(((ratio > 0) & ratio.isfinite())[used].all()):
        return ""
    for dim in along:
        apart = ratio.log().diff(dim=dim).abs()
        if float((apart > 2.0**-6).double().mean()) > 1 / 4:
            return ""
    least, most = float(ratio[used].min()), float(ratio[used].max())
    if most < least * (1 + 2.0**-5):
        return ""
    return f"{what} are {least:.3g} to {most:.3g} times the expected ones: their scales"


def other_signs(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Every number above 0 is below, and the other way round."""
    signs = expected.sign() * got.sign()
    all_are = got.numel() >= ENOUGH and bool((signs <= 0).all()) and bool((signs < 0).double().mean() > 1 / 2)
    return "every number has the other sign" if all_are else ""


def shifted(expected: torch.Tensor, got: torch.Tensor) -> str:
    """The expected tensor plus a constant."""
    if not expected.is_floating_point() or expected.shape != got.shape or got.numel() < ENOUGH:
        return ""
    apart = (got.double() - expected.double()).flatten()
    constant = float(apart.mean())
    if abs(constant) > 1e-2 and float((apart - constant).abs().max()) < 1e-2 * abs(constant):
        return f"is the expected tensor {constant:+.3g}"
    return ""


#: With fewer elements, equal values may be chance.
ENOUGH = 4


def foreign(expected: torch.Tensor, got: torch.Tensor, candidates: Candidates) -> str:
    """The expected elements in an order that no other trial explains, or values that the checkpoint does not have."""
    if expected.element_size() not in (4, 8) or got.numel() < ENOUGH:
        return ""
    want, have = bits(expected), bits(got)
    if torch.equal(want.sort().values, have.sort().values):
        return "the expected elements in another order"
    if int(torch.isin(have, want).sum()) * 20 > len(have):
        return ""
    if _alike(expected, got):
        return "arithmetic, not movement: close to the expected values, and no element is equal"
    if got.dim() > 1 and any(candidates.line(x, c) is not None for c in (False, True) for x in lines_of(got, c)):
        return ""
    return "nothing of it is in the checkpoint: an initial value, or memory never written"


def _alike(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the difference is small beside the expected values, as after arithmetic in a short dtype."""
    if expected.shape != got.shape or not expected.is_floating_point():
        return False
    e, g = expected.double().flatten(), got.double().flatten()
    return float((g - e).norm()) < 0.3 * float(e.norm())
