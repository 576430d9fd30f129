"""One rule in one cell: why it is not judged, or what its judge says, with known failures taken into account."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.results import Verdict
from moeref_conformance.contract.rules import Rule
from moeref_conformance.judges import Case
from moeref_conformance.plan.known_failures import lookup
from moeref_conformance.plan.plan import RunPlan, repeat


def not_judged(plan: RunPlan, cell: Cell, rules: Sequence[Rule], gap: str) -> dict[str, Verdict]:
    """Verdicts by id on those rules that are unclaimed, disabled, or untested because of `gap`."""
    found, why_not = {}, plan.claims.why_not(cell)
    for rule in rules:
        unclaimed = why_not or _unclaimed(plan, cell, rule)
        reasons = {"unclaimed": unclaimed, "disabled": _disabled(plan, cell, rule), "untested": gap}
        if told := next(((status, reason) for status, reason in reasons.items() if reason), None):
            found[rule.id] = Verdict(cell=cell.id, rule=rule.id, status=told[0], reason=told[1])
    return found


def _unclaimed(plan: RunPlan, cell: Cell, rule: Rule) -> str:
    if reason := rule.unclaimed(plan.claims):
        return reason
    if plan.recorded is not None:
        recorded = plan.recorded.recorded_steps(cell)
        if lacking := [step for step in rule.steps if step not in recorded]:
            return f"the dump has no record of {' and '.join(lacking)}"
    return ""


def _disabled(plan: RunPlan, cell: Cell, rule: Rule) -> str:
    if plan.enabled(cell, rule):
        return ""
    return "not in the selection" if rule.id not in plan.selected else "not in this grid of the matrix"


def judged(
    plan: RunPlan,
    case: Case,
    rule: Rule,
    judge: Callable[[Case], Outcome] | None,
    so_far: Mapping[str, Verdict],
    no_baseline: str,
) -> Verdict:
    """The verdict of `judge`. `so_far` has the verdicts on its prerequisites; `no_baseline` says why there is none."""
    if reason := _unmet(rule, so_far):
        return verdict(plan, case.cell, rule, "untested", reason=reason)
    if judge is None:
        return verdict(plan, case.cell, rule, "error", reason=f"the kit has no judge for {rule.id}")
    began = time.monotonic()
    try:
        outcome = judge(case)
    except Exception as error:  # the kit's own failure, reported as such
        status, reason = _of_raised(plan, rule, error)
        return verdict(plan, case.cell, rule, status, reason=reason)
    say = partial(verdict, plan, case.cell, rule, seconds=round(time.monotonic() - began, 3))
    if outcome.untested:
        reason = f"{outcome.untested} ({no_baseline})" if no_baseline and case.baseline is None else outcome.untested
        return say("untested", reason=reason)
    plain = say("fail", findings=outcome.findings) if outcome.findings else say("pass", met=outcome.met)
    return _with_known_failures(plan, case.cell, rule, plain)


def _of_raised(plan: RunPlan, rule: Rule, error: Exception) -> tuple[str, str]:
    """Status and reason of a rule whose judge raised. The record of a dump may be of an older version of the kit."""
    if plan.recorded is None or isinstance(error, BadInput):
        return "error", f"the judge raised {describe(error)}"
    steps, said = " and ".join(rule.steps), f"{type(error).__name__}: {error}"
    told = f"the record of {steps} lacks what {rule.id} reads, or has it in another form ({said})"
    return "untested", f"{told}: record again with this version of the kit"


def _unmet(rule: Rule, so_far: Mapping[str, Verdict]) -> str:
    """The prerequisite that did not pass, or "". One that a dump has no record of (unclaimed) does not count."""
    for needed in rule.requires:
        if needed in so_far and so_far[needed].status not in ("pass", "unclaimed"):
            return f"requires {needed}, which did not pass ({so_far[needed].status})"
    return ""


def _with_known_failures(plan: RunPlan, cell: Cell, rule: Rule, plain: Verdict) -> Verdict:
    """`plain`, or if a known failure covers it: xfail for a failure, xpass for a pass; a flaky one is always xfail.

    A failure with a finding that the entry's pattern does not match stays one, that finding first.
    """
    entry = lookup(plan.known_failures, cell, rule)
    if entry is None:
        return plain
    if others := entry.others(plain.findings):
        findings = (*others, *(finding for finding in plain.findings if finding not in others))
        return replace(plain, findings=findings, reason=f"not the known failure, whose pattern is {entry.said}")
    if entry.outcome == "flaky":
        passed = " It passed this time." if plain.status == "pass" else ""
        return replace(plain, status="xfail", reason=f"flaky: {entry.text}.{passed}")
    if plain.status == "pass":
        return replace(plain, status="xpass", reason=f"passes, but is listed as a known failure: {entry.text}")
    return replace(plain, status="xfail", reason=entry.text)


def verdict(plan: RunPlan, cell: Cell, rule: Rule, status: str, **more: Any) -> Verdict:
    """A verdict with the command that repeats it."""
    return Verdict(cell=cell.id, rule=rule.id, status=status, repeat=repeat(plan.settings, cell, rule), **more)


def describe(error: BaseException) -> str:
    """An error with the end of its traceback. Bad input says itself where it is."""
    if isinstance(error, BadInput):
        return str(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)[-3:])}"
