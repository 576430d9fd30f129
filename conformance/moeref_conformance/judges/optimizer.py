"""OPT: steps of an optimizer from the weights that were loaded: at the rate 0 none moves, at another all do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord, digest
from moeref_conformance.contract.requests.optimizer import MOVED, RELOADED, SETTINGS, STILL, WITH_BOTH, rates
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    finding,
    less_one,
    missing_records,
    outcome,
    parameters,
    placement,
    records,
    tolerance,
    unmeasured,
    within,
)
from moeref_conformance.judges.step_gradients import step_gradients
from moeref_conformance.judges.stepped import (
    ELSEWHERE,
    FEW,
    LIMIT,
    TURNED,
    Stepped,
    by_formula,
    experts_of_layers,
    finding_of,
    from_loaded,
    how_far,
    way_of,
)
from moeref_conformance.oracles import optimizer
from moeref_conformance.oracles.placement import Placement

#: So many elements may all be elsewhere, in a parameter of which others move: of one, seen on a GPU.
LUCK = 2
#: Below fp32: the share of the elements that only small steps together move which may stand still.
LOST = 0.5
#: Of a digit: what alone moves nothing, and what does together.
FAINT, TOGETHER = 0.49, 0.6


@judges("OPT-001", exact=True)
def a_step_at_rate_zero_moves_nothing(case: Case) -> Iterator[Finding]:
    """Every parameter after it, against the checkpoint's shard; the same after another load."""
    yield from missing_records(case, "inventory", "optimizer")
    for record in records(case, "inventory", "optimizer"):
        for of in _parameters(case, placement(case), record):
            before = {f"{row['chunk']}:{row['local']}": row["digest"] for row in _begun(record)}.get(of.key)
            yield from _moved_at_rate_zero(case, record, of, of.after[STILL], "loaded", before)
            if of.reloaded is not None:
                before = digest(list(of.after.values())[-1])
                yield from _moved_at_rate_zero(case, record, of, of.reloaded, "loaded again", before)


def _moved_at_rate_zero(
    case: Case, record: RankRecord, of: Stepped, after: torch.Tensor, how: str, before: str | None
) -> Iterator[Finding]:
    """The finding of a parameter that is not as it was loaded; `before` is the digest of what it held until then."""
    difference = compare(of.held.tensor, after, of.held.rows)
    if difference is not None and not less_one(case, of.key, of.held, after):
        said = f"what it held before it was {how}" if before == digest(after) else ""
        message = f"{of.key}: {how}, and after a step at the rate 0 {difference.text}"
        yield finding_of(case, record, of.key, of.held, message, diagnosis=said, **difference.told)


@judges("OPT-002")
def a_step_moves_every_weight(case: Case) -> Outcome:
    """In fp32 each element against Adam's formula and transformers' gradients.

    In bf16, where rounding turns routes: nearly all elements with a gradient move where the formula has them, of a
    router and of the experts of a layer most. None moves further than the rate. Steps of less than half of a weight's
    last digit add up. Ranks that share a parameter agree.
    """
    if no := unmeasured(case):
        return no
    findings, worst = missing_records(case, "inventory", "optimizer"), 0.0
    exact = case.cell.dtype == "float32"
    for record in records(case, "inventory", "optimizer"):
        stepped = list(_parameters(case, step_gradients(case)[MOVED], record))
        for of in stepped:
            if not of.on_record:
                findings.append(finding_of(case, record, of.key, of.held, f"{of.key}: no record of it after a step"))
                continue
            if exact:
                more, far = by_formula(case, record, of)
                findings, worst = [*findings, *more], max(worst, far)
            else:
                findings += _in_bf16(case, record, of)
        if not exact:
            findings += [*_experts(case, record, stepped), *_adding_up(case, record, stepped)]
    findings += [] if exact else _apart(case)
    return outcome(findings, met=within(case, worst, LIMIT) if exact else "every tensor moves, by the rate at most")


@judges("OPT-006")
def settings_reach_the_optimizer(case: Case) -> Outcome:
    """The second of two steps that are made with settings, against the formula with these, and the first with both."""
    if no := unmeasured(case):
        return no
    findings, worst, none = missing_records(case, "inventory", "optimizer_settings"), 0.0, torch.empty(0)
    for record in records(case, "inventory", "optimizer_settings"):
        tensors = record.tensors("optimizer_settings")
        for prefix, (words, steps) in _with_settings(case).items():
            for key, (held,) in parameters(record, placement(case)):
                of = from_loaded(case, record, key, held, tensors.get(f"{prefix}{key}", none))
                if not of.on_record:
                    message = f"{key}: no record of it after steps {words}"
                    findings.append(finding_of(case, record, key, held, message))
                    continue
                found, far = by_formula(case, record, of, steps, optimizer.read(SETTINGS))
                findings += [replace(one, message=f"{words} {one.message}") for one in found]
                worst = max(worst, far)
    return outcome(findings, met=within(case, worst, LIMIT))


def _with_settings(case: Case) -> dict[str, tuple[str, tuple[str, ...]]]:
    """What begins the names of parameters, by which words and steps: with settings, and with a schedule besides."""
    both = {f"{WITH_BOTH}.": ("with settings and a schedule", (MOVED,))} if case.claims.optimizer_schedules else {}
    return {"": ("with settings", (STILL, MOVED)), **both}


def _begun(record: RankRecord) -> list[dict[str, Any]]:
    """Digests of what the tensors held before they were loaded; none where a cell does not record them."""
    return list((record.value("begun") if record.has("begun") else None) or ())


def _parameters(case: Case, placed: Placement, record: RankRecord) -> Iterator[Stepped]:
    """Every parameter of a rank that the oracle knows."""
    tensors, none = record.tensors("optimizer"), torch.empty(0)
    reloaded = any(name.startswith(f"{RELOADED}.") for name in tensors)
    for key, (held,) in parameters(record, placed):
        again = tensors.get(f"{RELOADED}.{key}", none) if reloaded else None
        yield Stepped(key, held, {step: tensors.get(f"{step}.{key}", none) for step in rates(case.cell)}, again)


def _in_bf16(case: Case, record: RankRecord, of: Stepped) -> Iterator[Finding]:
    """Elements that stand still or move up the gradient, and elements that moved further than the rate."""
    still, last = (values.double()[: of.held.rows] for values in _ends(of))
    added, most = last - still, OPTIMIZER_RATE * (len(of.after) - 1) * (1 + LIMIT)
    if not bool((added.abs() <= most + 2 * of.last_digit).all()):
        message = f"{of.key}: elements moved further than {tolerance(case, OPTIMIZER_RATE)} in a step, the rate"
        yield finding_of(case, record, of.key, of.held, message, diagnosis=how_far(added))
    if of.held.expert is None:
        yield from _not_moved(case, record, of)


def _not_moved(case: Case, record: RankRecord, of: Stepped) -> Iterator[Finding]:
    """The finding of a parameter that is no expert's, if too many elements do not move where the formula has them."""
    astray, sure = _astray(case, record.rank, of)
    most = TURNED * sure if of.key.endswith("router.weight") else ELSEWHERE * sure + FEW
    none = 0 < sure == astray and (sure > LUCK or torch.equal(*_ends(of)))
    if astray > most or none:
        message = f"{of.key}: {astray} of {sure} elements with a gradient did not move down it"
        yield finding_of(case, record, of.key, of.held, message, diagnosis=_said_of(of))


def _astray(case: Case, rank: int, of: Stepped) -> tuple[int, int]:
    """Of how many elements that move by more than their last digit, and how many of them stand still or move up."""
    still, last = (values.double()[: of.held.rows] for values in _ends(of))
    way = way_of(case, rank, of)
    due = torch.stack(way.adds).sum(0)
    sure = way.tells & (due.abs() > of.last_digit)
    return int((sure & ((last - still) * due <= 0)).sum()), int(sure.sum())


def _said_of(of: Stepped) -> str:
    return "not moved at all" if torch.equal(*_ends(of)) else "not moved in part"


def _ends(of: Stepped) -> tuple[torch.Tensor, torch.Tensor]:
    """What a parameter holds after the first step, and after the last one."""
    still, *_, last = of.after.values()
    return still, last


def _experts(case: Case, record: RankRecord, stepped: Sequence[Stepped]) -> Iterator[Finding]:
    """Experts of layers in which too many elements do not move where the formula has them: one may have no token."""
    for astray, sure, of in experts_of_layers(stepped, lambda of: _astray(case, record.rank, of)):
        if astray > TURNED * sure:
            message = f"{of.key} and other experts: {astray} of {sure} elements with a gradient did not move down it"
            yield finding_of(case, record, of.key, of.held, message, diagnosis=_said_of(of))


def _adding_up(case: Case, record: RankRecord, stepped: Sequence[Stepped]) -> Iterator[Finding]:
    """Weights of which no step moves half of the last digit, and all of them more than that."""
    due = stand = 0
    for of in stepped:
        way = way_of(case, record.rank, of)
        still, last = (values.double()[: of.held.rows] for values in _ends(of))
        adds, digit = torch.stack(way.adds), of.last_digit
        sure = way.tells & (adds.abs().amax(0) < FAINT * digit) & (adds.sum(0).abs() > TOGETHER * digit)
        due, stand = due + int(sure.sum()), stand + int((sure & (last == still)).sum())
    if stand > LOST * due:
        message = f"{stand} of {due} elements did not move in {len(rates(case.cell)) - 1} steps that add up to a digit"
        yield finding(case, record.rank, "optimizer", message, diagnosis="small steps are lost")


def _apart(case: Case) -> Iterator[Finding]:
    """Parameters that ranks share and hold otherwise."""
    first: dict[tuple[str, str], tuple[int, torch.Tensor]] = {}
    for record in records(case, "inventory", "optimizer"):
        for of in _parameters(case, placement(case), record):
            last, same = of.after["again"][: of.held.rows], (of.key, digest(of.held.tensor.contiguous()))
            rank, other = first.setdefault(same, (record.rank, last))
            apart = int((last != other).sum()) if last.shape == other.shape else last.numel()
            if apart > ELSEWHERE * last.numel():
                told = f"{apart} of {last.numel()} elements are not what rank {rank} has after the same steps"
                yield finding_of(case, record, of.key, of.held, f"{of.key}: {told}", diagnosis="replicas part")
