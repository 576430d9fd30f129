"""QNT: what an engine in FP8 blocks is sent, against the weights and the config that it was asked for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.diagnosis.compare import compare, dtype_name
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    changed,
    expected,
    finding,
    missing_records,
    once,
    outcome,
    receivers,
    values,
)
from moeref_conformance.oracles import quantised as oracle

SCALES = request.SCALES
FP8 = torch.float8_e4m3fn
#: Dtypes of scales in published files, DeepSeek's and Qwen's; and of nothing but powers of two, where these are asked
#: for. By name: torch 2.6 has no such dtype.
SCALE_DTYPES = ("float32", "bfloat16")
POWERS = "float8_e8m0fnu"
#: A scale in bf16 is up to this much larger than its block needs.
ROUNDED = 1 + 2.0**-7


@dataclass(frozen=True)
class _Sent:
    """What was asked for, and the tensors of the rank, or together of the ranks, that were given any."""

    rank: int
    names: list[str]
    tensors: dict[str, torch.Tensor]
    want: dict[str, torch.Tensor]
    quantised: frozenset[str]
    block: tuple[int, int]
    #: The config asks for scales that are powers of two.
    powers: bool
    #: Those that held other values when the stream had ended, of a target that claims that they last.
    overwritten: list[str]

    def may_be(self, scales: torch.Tensor) -> bool:
        """Whether scales have a dtype that they may have."""
        return dtype_name(scales.dtype) in (*SCALE_DTYPES, *([POWERS] if self.powers else []))

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, weight and scales of what is quantised and there, in their shapes and dtypes."""
        for name in sorted(self.quantised):
            weight, scales = self.tensors.get(name), self.tensors.get(name + SCALES)
            if weight is None or scales is None or weight.dtype != FP8 or not self.may_be(scales):
                continue
            want = self.want[name]
            if weight.shape == want.shape and list(scales.shape) == oracle.grid(want.shape, self.block):
                yield name, weight, scales


@once
def _sent(case: Case) -> list[_Sent]:
    """What each receiver was given, or all together where each is given a share. Empty if none was given a tensor."""
    given = receivers(case, "quantised", lambda value: bool(value["names"]))
    if not any(record.value("quantised")["names"] for ranks in given for record in ranks):
        return []
    block, lasts = request.BLOCKS[case.cell.family], case.claims.lasts == "stream"
    want = request.weights(expected(case).tensors, block)
    asked = request.config(expected(case).config)
    quantised = frozenset(oracle.quantised(asked, want))
    powers = asked["quantization_config"].get("scale_fmt") == "ue8m0"
    return [
        _Sent(
            rank=ranks[0].rank,
            names=[name for record in ranks for name in record.value("quantised")["names"]],
            tensors={name: tensor for record in ranks for name, tensor in record.tensors("quantised").items()},
            want=want,
            quantised=quantised,
            block=block,
            powers=powers,
            overwritten=[name for record in ranks if lasts for name in record.value("quantised")["overwritten"]],
        )
        for ranks in given
    ]


def _found(case: Case, sent: _Sent, message: str, name: str, **more: Any) -> Finding:
    return finding(case, sent.rank, "quantised", f"{name}: {message}", hf_name=name, **more)


def _of_sent(judge: Callable[[Case, list[_Sent]], Outcome | Iterable[Finding]]) -> Callable[[Case], Any]:
    """Call a judge with what was sent. If that is nothing, or a rank has no record of it, that is the finding."""

    @functools.wraps(judge)
    def judged(case: Case) -> Any:
        if missing := missing_records(case, "quantised"):
            return missing
        if not (sent := _sent(case)):
            return [finding(case, None, "quantised", "no rank was given a tensor")]
        lost = [(one, name) for one in sent for name in sorted({*one.names} - one.tensors.keys())]
        return [_found(case, one, "no record of its values", name) for one, name in lost] or judge(case, sent)

    return judged


def _per_receiver(judge: Callable[[Case, _Sent], Iterator[Finding]]) -> Callable[[Case], Any]:
    """Call a judge for each receiver."""

    @_of_sent
    @functools.wraps(judge)
    def judged(case: Case, sent: list[_Sent]) -> Iterator[Finding]:
        for one in sent:
            yield from judge(case, one)

    return judged


@judges("QNT-001")
@_per_receiver
def every_tensor_once_with_its_scales(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Names against those of the checkpoint, with one of scales for every quantised weight; what was overwritten."""
    want, times = {*sent.want, *(name + SCALES for name in sent.quantised)}, Counter(sent.names)
    for name in sorted(want - times.keys()):
        yield _found(case, sent, "was never sent", name)
    for name in sorted(times):
        if name not in want:
            yield _found(case, sent, "is not in the FP8 checkpoint", name)
        elif times[name] > 1:
            yield _found(case, sent, f"was sent {times[name]} times", name)
    for name in sent.overwritten:
        yield _found(case, sent, "held other values at the end of the stream than when it was given", name)


@judges("QNT-002")
@_per_receiver
def weights_in_fp8(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Shape and dtype of the weights that are quantised."""
    for name in sorted(sent.quantised & sent.tensors.keys()):
        got, right = sent.tensors[name], [FP8, list(sent.want[name].shape)]
        if [got.dtype, list(got.shape)] != right:
            what = f"is {dtype_name(got.dtype)} {list(got.shape)}"
            yield _found(case, sent, what, name, expected=f"{dtype_name(FP8)} {right[1]}", got=what)


@judges("QNT-003")
@_per_receiver
def a_scale_for_each_block(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Shape and dtype of the scales that are there."""
    for name in sorted(sent.quantised):
        got, right = sent.tensors.get(name + SCALES), oracle.grid(sent.want[name].shape, sent.block)
        if got is not None and (not sent.may_be(got) or list(got.shape) != right):
            what = f"the scales of {list(sent.want[name].shape)} are {dtype_name(got.dtype)} {list(got.shape)}"
            yield _found(case, sent, what, name, expected=f"float32 {right}", got=what)


@judges("QNT-004")
@_of_sent
def weights_within_the_rounding(case: Case, sent: list[_Sent]) -> Outcome:
    """Weights times scales against the weights that were loaded, element by element."""
    findings, worst = [], 0.0
    for one, name, weight, scales in ((each, *pair) for each in sent for pair in each.pairs()):
        want, made = one.want[name].float(), oracle.dequantised(weight, scales, one.block)
        limit = oracle.limits(want, one.block)
        off = torch.nan_to_num((made - want).abs(), nan=torch.inf)
        if bool((off > limit).any()):
            first = tuple(int(i) for i in (off > limit).nonzero()[0])
            block = [at // size for at, size in zip(first, one.block, strict=True)]
            text = f"{int((off > limit).sum())} of {off.numel()} elements are beyond the rounding of e4m3"
            message = f"{text}, first at {list(first)}, in block {block} with scale {float(scales[tuple(block)]):.3g}"
            right, got = float(want[first]), float(made[first])
            findings.append(_found(case, one, message, name, expected=right, got=got))
        else:
            worst = max(worst, float((off / limit.clamp_min(torch.finfo(torch.float32).tiny)).max()))
    return outcome(findings, met=f"at most {worst:.2f} of the limit")


@judges("QNT-005", exact=True)
@_per_receiver
def the_rest_as_it_is(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Every tensor without scales, bit for bit."""
    for name in sorted((sent.want.keys() - sent.quantised) & sent.tensors.keys()):
        if (difference := compare(sent.want[name], sent.tensors[name])) is not None:
            yield _found(case, sent, difference.text, name, **difference.told)


@judges("QNT-006")
@_per_receiver
def scales_that_fit(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Scales against the largest magnitude of their block / 448, or the next power of two; of zeros any is right."""
    for name, _, scales in sent.pairs():
        right = oracle.largest(sent.want[name], sent.block) / oracle.LARGEST
        right = oracle.next_power(right) if sent.powers else right
        found = scales.float()
        problems = {"larger than needed": ~(found <= right * ROUNDED), "below 0": found < 0}
        for problem, everywhere in problems.items():
            wrong = (right > 0) & everywhere
            if bool(wrong.any()):
                at = tuple(int(i) for i in wrong.nonzero()[0])
                want, got = float(right[at]), float(found[at])
                message = f"{int(wrong.sum())} scales are {problem}, that of block {list(at)} {got / want:.3g} times"
                yield _found(case, sent, message, name, expected=want, got=got)


@judges("QNT-008")
@_per_receiver
def powers_of_two_where_asked(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Scales against the powers of two."""
    for name, _, scales in sent.pairs() if sent.powers else ():
        wrong = torch.frexp(scales.float()).mantissa != 0.5
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            message = (
                f"{int(wrong.sum())} scales are no powers of two, that of block {list(at)} is {float(scales[at]):.6g}"
            )
            yield _found(case, sent, message, name)


@judges("QNT-007")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What a stream in FP8 has changed beside it, by kind."""
    yield from missing_records(case, "quantised")
    for rank, value in values(case, "quantised"):
        yield from changed(case, rank, "quantised", "stream in FP8", value["left"])
