"""OPT-011: a model and an optimizer that made room on their device between two steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.optimizer import BACK, BEFORE, MOVED, OFFLOADED, ON, STILL, WAS, rates
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    ANSWERS_APART,
    finding,
    missing_records,
    outcome,
    parameters,
    records,
    tolerance,
    unmeasured,
    values,
)
from moeref_conformance.judges.resumed import all_alike, all_otherwise
from moeref_conformance.judges.step_gradients import step_gradients
from moeref_conformance.judges.stepped import Stepped

STEP = "optimizer_offloaded"


@judges("OPT-011")
def all_is_as_it_was_after_an_offload(case: Case) -> Outcome:
    """Tensors and streams byte for byte, logits of weights alone in fp32, and the next step against that without.

    Weights in new memory begin at other addresses, by which a CPU's sums in fp32 may come in another order: of elements
    with sure gradients the step is then within LIMIT of the rate.
    """
    if no := unmeasured(case):
        return no
    findings = missing_records(case, "inventory", "optimizer", STEP)
    findings += [*_not_as_before(case), *_otherwise_with_weights_alone(case), *_stepped_otherwise(case)]
    return outcome(findings, met=all_alike(case))


def _not_as_before(case: Case) -> Iterator[Finding]:
    for rank, told in values(case, STEP):
        for key in told["gone"]:
            message = f"{key}: it is gone once all is back from an offload"
            yield finding(case, rank, STEP, message, local_name=key.partition(":")[2])
    for record in records(case, "inventory", STEP):
        tensors = record.tensors(STEP)
        for key, back in ((name.partition(".")[2], of) for name, of in tensors.items() if name.startswith(f"{BACK}.")):
            was = tensors.get(f"{WAS}.{key}", torch.empty(0))
            difference = compare(was, back)
            said, told = (difference.text, difference.told) if difference else ("", {})
            message, local = f"{key}: once all is back from an offload {said}", key.partition(":")[2]
            yield finding(case, record.rank, STEP, message, local_name=local, diagnosis=_what(was, back), **told)


def _what(was: torch.Tensor, back: torch.Tensor) -> str:
    """What is there in place of the tensor that was."""
    if was.shape != back.shape or not was.is_floating_point():
        return ""
    if not bool(back.isfinite().all()):
        return f"{int((~back.isfinite()).sum())} elements are not finite"
    if not bool(back.any()):
        return "all are 0"
    return "rounded to bfloat16" if torch.equal(was.bfloat16().to(back.dtype), back) else ""


def _otherwise_with_weights_alone(case: Case) -> Iterator[Finding]:
    for rank, told in values(case, STEP):
        for name in told["sent"]:
            message = f"{name}: with weights alone back from an offload it is sent otherwise than before"
            yield finding(case, rank, STEP, message, hf_name=name)
        off = told["off"]
        if off is not None and case.cell.dtype == "float32" and not off <= ANSWERS_APART:
            message = f"with weights alone back from an offload logits are {off:.3g} of the largest off those before"
            yield finding(case, rank, STEP, message, expected=f"within {tolerance(case, ANSWERS_APART)}")


def _stepped_otherwise(case: Case) -> Iterator[Finding]:
    """Parameters that the step after an offload has elsewhere than that of an optimizer which stayed."""
    last = list(rates(case.cell))[-1]
    for record in records(case, "inventory", "optimizer", STEP):
        after, right, none = record.tensors(STEP), record.tensors("optimizer"), torch.empty(0)
        stepped = list[Stepped]()
        for key, (held,) in parameters(record, step_gradients(case)[MOVED]):
            before, moved = (after.get(f"{when}.{key}", none) for when in (BEFORE, OFFLOADED))
            of = {STILL: before, ON: right.get(f"{last}.{key}", none), MOVED: moved}
            stepped.append(Stepped(key, held, of, None))
        yield from all_otherwise(case, record, stepped, "an offload")
