"""What a step has to show in which a target must raise: an error on some rank, or on every rank one that names it."""

from __future__ import annotations

from collections.abc import Iterator

from moeref_conformance.contract.findings import Finding
from moeref_conformance.judges import Case
from moeref_conformance.judges.common import check_no_crash, finding, observed


def refused_somewhere(case: Case, step: str, what: str) -> Iterator[Finding]:
    """A rank must have raised in `step`, and every rank must have come to its end."""
    yield from (stuck := unfinished(case, step))
    if not stuck and not any(record.error(step) for record in observed(case).ranks):
        yield finding(case, None, step, f"{what}, and nothing was raised on any rank", expected="an error")


def refused_by_name(case: Case, step: str, name: str, what: str) -> Iterator[Finding]:
    """Every rank must have raised in `step` with a message that holds `name`."""
    yield from unfinished(case, step)
    for record in observed(case).ranks:
        error = record.error(step)
        if error is not None and name not in error["message"]:
            message = f"the error does not name {name}: {error['type']}: {error['message'][:300]}"
            yield finding(case, record.rank, step, message, expected=name)
        elif error is None and record.has(step):
            yield finding(case, record.rank, step, f"{what}, and nothing was raised", expected=f"an error with {name}")


def unfinished(case: Case, step: str) -> list[Finding]:
    """A finding for every rank that did not come to the end of `step`, with what became of it.

    Raises `Untested` if a rank failed in another step.
    """
    done = {record.rank for record in observed(case).ranks if record.has(step) or record.error(step)}
    ended = {crash.rank: f": it {crash.kind} in step {crash.step}" for crash in observed(case).crashes}
    stuck = [rank for rank in range(case.cell.layout.world) if rank not in done]
    if stuck and step not in (crash.step for crash in observed(case).crashes):
        check_no_crash(case)
    return [finding(case, rank, step, f"no record of step {step}{ended.get(rank, '')}") for rank in stuck]
