"""QNT: what an engine in FP8 blocks or INT4 groups is sent, against the weights and the config that ask for it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests import int4
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.diagnosis.compare import compare, dtype_name
from moeref_conformance.judges import Case, Untested, judges
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
from moeref_conformance.oracles.quantised_forms import Form, Kind, form

#: A scale in bf16 is up to this much larger than its block needs.
ROUNDED = 1 + 2.0**-7


def _is(tensor: torch.Tensor, kind: Kind) -> bool:
    return dtype_name(tensor.dtype) in kind[0] and list(tensor.shape) == kind[1]


@dataclass(frozen=True)
class _Sent:
    """What was asked for, and the tensors of the rank, or together of the ranks, that were given any."""

    rank: int
    names: list[str]
    tensors: dict[str, torch.Tensor]
    want: dict[str, torch.Tensor]
    form: Form
    quantised: frozenset[str]
    #: Those that held other values when the stream had ended, of a target that claims that they last.
    overwritten: list[str]

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, numbers and scales of what is quantised and there, in their shapes and dtypes."""
        for name in sorted(self.quantised):
            numbers, scales = (self.tensors.get(name + end) for end in (self.form.numbers, self.form.scales))
            if numbers is None or scales is None:
                continue
            shape = self.want[name].shape
            if _is(numbers, self.form.of_numbers(shape)) and _is(scales, self.form.of_scales(shape)):
                yield name, numbers, scales

    def expected(self) -> set[str]:
        """The names of the tensors that files have."""
        ends = [self.form.numbers, self.form.scales, *([self.form.shape] if self.form.shape else [])]
        return {*(self.want.keys() - self.quantised), *(name + end for name in self.quantised for end in ends)}


def _check_claimed(case: Case) -> None:
    """Raise `Untested` where the form that a cell asks for is not claimed."""
    if case.cell.family in int4.FAMILIES and not case.claims.sends_int4:
        raise Untested("the target claims sends_int4=False")


@once
def _sent(case: Case) -> list[_Sent]:
    """What each receiver was given, or all together where each is given a share. Empty if none was given a tensor."""
    given = receivers(case, "quantised", lambda value: bool(value["names"]))
    if not any(record.value("quantised")["names"] for ranks in given for record in ranks):
        return []
    want = request.weights(expected(case).tensors, request.block(case.cell.family))
    asked, lasts = form(case.cell.family, expected(case).config), case.claims.lasts == "stream"
    return [
        _Sent(
            rank=ranks[0].rank,
            names=[name for record in ranks for name in record.value("quantised")["names"]],
            tensors={name: tensor for record in ranks for name, tensor in record.tensors("quantised").items()},
            want=want,
            form=asked,
            quantised=asked.quantised(want),
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
        _check_claimed(case)
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
    """Names against those of the files, with scales of every quantised weight; what was overwritten."""
    want, times = sent.expected(), Counter(sent.names)
    for name in sorted(want - times.keys()):
        yield _found(case, sent, "was never sent", name)
    for name in sorted(times):
        if name not in want:
            yield _found(case, sent, f"is not in the {sent.form.name} checkpoint", name)
        elif times[name] > 1:
            yield _found(case, sent, f"was sent {times[name]} times", name)
    for name in sent.overwritten:
        yield _found(case, sent, "held other values at the end of the stream than when it was given", name)


def _unlike(case: Case, sent: _Sent, name: str, end: str, kind: Kind, what: str) -> Iterator[Finding]:
    """A finding if the tensor of a weight whose name ends so is there and not of this kind."""
    got = sent.tensors.get(name + end)
    if got is not None and not _is(got, kind):
        what += f"{dtype_name(got.dtype)} {list(got.shape)}"
        yield _found(case, sent, what, name + end, expected=f"{kind[0][0]} {kind[1]}", got=what)


@judges("QNT-002")
@_per_receiver
def numbers_in_the_format(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Shape and dtype of the weights that are quantised; in INT4 the shape that is sent with them."""
    for name in sorted(sent.quantised):
        shape = sent.want[name].shape
        yield from _unlike(case, sent, name, sent.form.numbers, sent.form.of_numbers(shape), "is ")
        told = sent.tensors.get(name + sent.form.shape) if sent.form.shape else None
        if told is not None and (told.is_floating_point() or told.tolist() != list(shape)):
            what = f"is {dtype_name(told.dtype)} {told.tolist()}"
            yield _found(case, sent, what, f"{name}{sent.form.shape}", expected=f"int32 {list(shape)}", got=what)


@judges("QNT-003")
@_per_receiver
def a_scale_for_each_block(case: Case, sent: _Sent) -> Iterator[Finding]:
    """Shape and dtype of the scales that are there."""
    for name in sorted(sent.quantised):
        shape = sent.want[name].shape
        what = f"the scales of {list(shape)} are "
        yield from _unlike(case, sent, name, sent.form.scales, sent.form.of_scales(shape), what)


@judges("QNT-004")
@_of_sent
def weights_within_the_rounding(case: Case, sent: list[_Sent]) -> Outcome:
    """Numbers times scales against the weights that were loaded, element by element."""
    findings, worst = [], 0.0
    for one, name, numbers, scales in ((each, *pair) for each in sent for pair in each.pairs()):
        want = one.want[name].float()
        made, limit = one.form.weight(numbers, scales, want.shape), one.form.limits(want)
        off = torch.nan_to_num((made - want).abs(), nan=torch.inf)
        if bool((off > limit).any()):
            first = tuple(int(i) for i in (off > limit).nonzero()[0])
            block = [at // size for at, size in zip(first, one.form.block, strict=True)]
            text = f"{int((off > limit).sum())} of {off.numel()} elements are beyond {one.form.rounding}"
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
    """Scales against the largest magnitude of their block / 448, or the next power of two, or in INT4 / 7; of zeros any
    is right."""
    for name, _, scales in sent.pairs():
        right, found = sent.form.needed(sent.want[name]), scales.float()
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
    for name, _, scales in sent.pairs() if sent.form.powers else ():
        wrong = torch.frexp(scales.float()).mantissa != 0.5
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            message = (
                f"{int(wrong.sum())} scales are no powers of two, that of block {list(at)} is {float(scales[at]):.6g}"
            )
            yield _found(case, sent, message, name)


@judges("QNT-007")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What a quantised stream has changed beside it, by kind."""
    _check_claimed(case)
    yield from missing_records(case, "quantised")
    stream = f"stream in {form(case.cell.family, expected(case).config).name}"
    for rank, value in values(case, "quantised"):
        yield from changed(case, rank, "quantised", stream, value["left"])
