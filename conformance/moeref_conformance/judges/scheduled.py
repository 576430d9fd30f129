"""OPT-009: how far the steps of an optimizer that has a schedule of learning rates move weights.

All its steps have one gradient, and are so small that it hardly changes: Adam then moves each element by the rate. Some
routes may turn all the same, and with them gradients of some parameters, so that medians are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.optimizer import BROKEN_OFF, RESUMED, SCHEDULE, SCHEDULED, STILL
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    expected,
    finding,
    missing_records,
    outcome,
    parameters,
    records,
    unmeasured,
    within,
)
from moeref_conformance.judges.step_gradients import step_gradients
from moeref_conformance.judges.stepped import Stepped, way_of
from moeref_conformance.oracles.optimizer import Schedule
from moeref_conformance.oracles.placement import ExpectedShard

STEP = "optimizer_schedule"
RIGHT = Schedule.read(SCHEDULE)
#: Of the highest rate: how far another may be off.
NEAR = 0.04
#: Steps in order, by their names in the record without a restore and behind one, and the number of each.
UNBROKEN = {str(number): number for number in range(SCHEDULED)}
RESTORED = {f"{RESUMED}.{number}": number for number in range(BROKEN_OFF, BROKEN_OFF + 2)}
#: The rate of a step by its number.
Rate = Callable[[int], float]


class Moved(NamedTuple):
    """Parameters of a kind and the rate at which each step moves them, the median; NaN if one is not on record.

    Megatron's optimizers have a group of parameters for each kind.
    """

    rank: int
    kind: str
    rates: Mapping[str, float]

    def off(self, name: str, number: int, rate: Rate = RIGHT.at) -> float:
        """How far the rate of a step is off that of this number."""
        return abs(self.rates[name] - rate(number)) / RIGHT.highest

    def wrong(self, steps: Mapping[str, int], first: int) -> list[str]:
        """The steps that have not the schedule's rate, if the first of all is number `first`."""
        return [name for name, number in steps.items() if not self.off(name, number + first) <= NEAR]


@judges("OPT-009")
def steps_follow_a_schedule(case: Case) -> Outcome:
    """The rates of steps, and of two after a restore, against the schedule's: the first of all is number 0, or 1."""
    if no := unmeasured(case):
        return no
    findings = missing_records(case, "inventory", STEP)
    steps = UNBROKEN | (RESTORED if case.claims.optimizer_saves else {})
    moved = [of for record in records(case, "inventory", STEP) for of in _of_kinds(case, record, steps)]
    first = min((0, 1), key=lambda first: sum(len(of.wrong(UNBROKEN, first)) for of in moved))
    findings += [_finding(case, of, steps, wrong[0], first) for of in moved if (wrong := of.wrong(steps, first))]
    worst = max((of.off(name, number + first) for of in moved for name, number in steps.items()), default=0.0)
    return outcome(findings, met=within(case, worst, NEAR))


def _of_kinds(case: Case, record: RankRecord, steps: Mapping[str, int]) -> Iterator[Moved]:
    kinds: dict[str, list[dict[str, float]]] = {}
    for held, rates in _parameters(case, record, steps):
        weights = "parameters of one dimension" if held.tensor.dim() == 1 else "weights"
        kinds.setdefault(weights if held.expert is None else "experts", []).append(rates)
    for kind, found in kinds.items():
        medians = {name: float(torch.tensor([one[name] for one in found]).median()) for name in steps}
        yield Moved(record.rank, kind, medians)


def _parameters(
    case: Case, record: RankRecord, steps: Mapping[str, int]
) -> Iterator[tuple[ExpectedShard, dict[str, float]]]:
    """Every parameter with sure gradients, and the median by which its elements move down these in each step."""
    tensors = record.tensors(STEP)
    for key, (held,) in parameters(record, step_gradients(case)[STILL]):
        way = way_of(case, record.rank, Stepped(key, held, {}, None), (STILL,))
        if not bool(way.tells.any()):
            continue
        rates = dict[str, float]()
        for name, number in steps.items():
            begun = str(number) if number == BROKEN_OFF else name
            ends = [tensors.get(f"{of}.{key}") for of in (begun, name.replace(str(number), str(number + 1)))]
            rates[name] = _rate(ends, held, way.tells, way.gradients[0].sign())
        yield held, rates


def _rate(ends: list[torch.Tensor | None], held: ExpectedShard, tells: torch.Tensor, signs: torch.Tensor) -> float:
    before, after = (torch.empty(0) if of is None else of[: held.rows].double() for of in ends)
    if before.shape != signs.shape or after.shape != signs.shape:
        return float("nan")
    return float(((before - after) * signs)[tells].median())


def _finding(case: Case, of: Moved, steps: Mapping[str, int], name: str, first: int) -> Finding:
    want, got = RIGHT.at(steps[name] + first), of.rates[name]
    behind = " behind a restore" if name in RESTORED else ""
    message = f"{of.kind}: the rate of step {steps[name]}{behind} is {got:.3g}, that of the schedule {want:.3g}"
    told = {
        "expected": want,
        "got": got,
        "diagnosis": _said(of, name in RESTORED, first, len(expected(case).tokens_BS)),
    }
    return finding(case, of.rank, "optimizer", message, **told)


def _said(of: Moved, restored: bool, first: int, rows: int) -> str:
    """The mistake that gives these rates; of steps behind a restore that of the last, as one may have been saved.

    The first step of all is tried as either number: rates that are wrong may seem to begin with the other one.
    """
    steps = dict(list(RESTORED.items())[-1:]) if restored else UNBROKEN
    for said, rate in _behind_a_restore() if restored else _mistakes(rows):
        for begun in (first, 1 - first):
            if all(of.off(name, number + begun, rate) <= NEAR for name, number in steps.items()):
                return said
    return ""


def _mistakes(rows: int) -> Iterator[tuple[str, Rate]]:
    """Words for a mistake, and the rates with it."""
    yield "not moved at all", lambda number: 0.0
    yield "the highest rate all along", lambda number: RIGHT.highest
    yield f"a step counts as {rows}, one for each row", lambda number: RIGHT.at(number * rows)
    yield f"{rows} steps count as one", lambda number: RIGHT.at(number / rows)
    yield "two steps count as one", lambda number: RIGHT.at(number // 2)
    yield "no warm-up", RIGHT._replace(warmup=0).at
    yield "no decay", RIGHT._replace(end=1e9).at
    yield "the warm-up is taken off the steps to the end of the decay", RIGHT._replace(end=RIGHT.end - RIGHT.warmup).at
    yield "the decay is a line", RIGHT._replace(cosine=False).at


def _behind_a_restore() -> Iterator[tuple[str, Rate]]:
    yield "the schedule begins again", lambda number: RIGHT.at(number - BROKEN_OFF)
    yield "steps before the save count twice", lambda number: RIGHT.at(number + BROKEN_OFF)
