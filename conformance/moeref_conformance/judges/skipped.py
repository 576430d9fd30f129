"""OPT-007: a step in which gradients of one rank are not finite leaves all ranks as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.optimizer import MOVED, NOT_FINITE, ON, STILL
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    finding,
    missing_records,
    outcome,
    parameters,
    records,
    unmeasured,
    values,
)
from moeref_conformance.judges.resumed import all_alike, all_otherwise
from moeref_conformance.judges.step_gradients import step_gradients
from moeref_conformance.judges.stepped import Stepped

STEP = "optimizer_not_finite"
#: What an error is about that refuses such a step.
NAMES_IT = re.compile(r"\b(nans?|infs?|infinity|(non-?|in)?finite|overflow\w*)\b", re.IGNORECASE)


@judges("OPT-007")
def steps_that_are_not_finite_are_skipped(case: Case) -> Outcome:
    """Weights after such a step, byte for byte; after the next one, against the same of an optimizer without it.

    Where all ranks refuse it, no more is asked of them than their weights, and an error that says why.
    """
    if no := unmeasured(case):
        return no
    findings, skipped = missing_records(case, "inventory", "optimizer", STEP), False
    for name in NOT_FINITE:
        told = {rank: value[name] for rank, value in values(case, STEP)}
        refused = {rank: of["refused"] for rank, of in told.items() if of["refused"]}
        found = [*_not_asked(case, name, told), *_parted(case, name, told), *_for_another_reason(case, name, refused)]
        found += [*_changed(case, name, told)]
        if not found and not refused:
            skipped, found = True, [*_gone_on(case, name)]
        findings += found
    return outcome(findings, met=all_alike(case) if skipped else "all ranks refuse")


def _not_asked(case: Case, name: str, told: dict[int, Any]) -> Iterator[Finding]:
    last = case.cell.layout.world - 1
    if last in told and not told[last]["spoiled"]:
        message = f"{name}: no gradient of a parameter passed its hook, so that none could be spoiled"
        yield finding(case, last, STEP, message)


def _parted(case: Case, name: str, told: dict[int, Any]) -> Iterator[Finding]:
    """Ranks that refuse a step which others take or skip."""
    refusing = [rank for rank, of in told.items() if of["refused"]]
    if 0 < len(refusing) < len(told):
        error = told[refusing[0]]["refused"]
        message = f"{name}: of {len(told)} ranks only {refusing} refuse the step: {error}"
        yield finding(case, refusing[0], STEP, message, diagnosis="ranks part")


def _for_another_reason(case: Case, name: str, refused: dict[int, str]) -> Iterator[Finding]:
    for rank, error in refused.items():
        if not NAMES_IT.search(error):
            message = f"{name}: the error does not say that a gradient is not finite: {error}"
            yield finding(case, rank, STEP, message, expected="an error that says so")


def _changed(case: Case, name: str, told: dict[int, Any]) -> Iterator[Finding]:
    """Parameters and buffers that the step has changed."""
    kept = [rank for rank, of in told.items() if not of["changed"]]
    for rank, of in told.items():
        for key, count in of["changed"].items():
            message = f"{name}: {key} is not as it was before a step whose gradients are not finite"
            said = f"{count} elements are not finite" if count else "moved"
            said += f"; ranks {kept} skip the step" if kept else ""
            yield finding(case, rank, STEP, message, local_name=key.partition(":")[2], diagnosis=said)


def _gone_on(case: Case, name: str) -> Iterator[Finding]:
    """Parameters that the next step moves otherwise than that of an optimizer which has not been asked for this one."""
    for record in records(case, "inventory", "optimizer", STEP):
        after, right, none = record.tensors(STEP), record.tensors("optimizer"), torch.empty(0)
        gone_on = list[Stepped]()
        for key, (held,) in parameters(record, step_gradients(case)[MOVED]):
            still, on = (right.get(f"{when}.{key}", none) for when in (STILL, MOVED))
            gone_on.append(Stepped(key, held, {STILL: still, ON: on, MOVED: after.get(f"{name}.{key}", none)}, None))
        yield from all_otherwise(case, record, gone_on, f"a skipped step, of {name}")
