"""RUN and TOP: every rank finishes, collectives agree, inputs are left alone, process groups are megatron-core's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import REFUSALS
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import all_missing_records, finding, missing_records, observed, values

#: Name of the error of the checked collectives.
MISMATCH = "CollectiveMismatch"


@judges("RUN-001")
def every_rank_finishes(case: Case) -> Iterable[Finding]:
    """Crashes in the order in which ranks failed, so that the first finding is the one to look at.

    In the last steps the target is given bad input. NAM-006, NAM-009, LOD-002, LOD-003, LOD-006 and RPL-007 judge
    failures there, hangs included.
    """
    run, findings = observed(case), []
    late = {crash.rank for crash in run.crashes if crash.step in REFUSALS}
    crashes = [crash for crash in run.crashes if crash.rank not in late]
    for i, crash in enumerate(crashes):
        first = "failed first: " if i == 0 and len(crashes) > 1 else ""
        message = f"{first}{crash.kind} in step {crash.step}: {crash.detail}"
        later = f"{crash.kind} later" if i else ""
        findings.append(finding(case, crash.rank, crash.step, message, diagnosis=later))
    answering = [0] if case.cell.backend == "static" else range(case.cell.layout.world)
    return findings or [f for f in all_missing_records(case, "close") if f.rank in answering and f.rank not in late]


@judges("RUN-002")
def collectives_agree(case: Case) -> Outcome | list[Finding]:
    """A disagreement raises in every member; one finding a rank."""
    run, findings = observed(case), []
    for record in run.ranks:
        for event in record.events:
            error = event.get("error") or {}
            if MISMATCH in (error.get("type") or "") or f"{MISMATCH}:" in (error.get("traceback") or ""):
                findings.append(finding(case, record.rank, event["step"], f"{MISMATCH}: {error['message']}"))
    if not findings and run.crashes:
        crash = run.crashes[0]
        return Outcome(untested=f"rank {crash.rank} {crash.kind} in step {crash.step}, with no disagreement seen")
    return findings or missing_records(case, "close")


@judges("RUN-003")
def inputs_are_left_alone(case: Case) -> list[Finding]:
    """A finding for every input that is not as it was given, whichever rank changed it."""
    run = observed(case)
    if not run.ranks:
        return missing_records(case, "inputs")
    return [finding(case, None, "inputs", f"the target wrote to its inputs: {what}") for what in run.written]


@judges("RUN-004")
def settings_are_left_alone(case: Case) -> list[Finding]:
    """What steps have left otherwise, also of a rank that raised later, perhaps because of it."""
    found = [
        finding(
            case,
            rank,
            step,
            f"step {step} left {setting} at {after}, which was {before}",
            expected=before,
            got=after,
            diagnosis=f"not as before step {step}: {setting}",
        )
        for rank, rows in values(case, "settings")
        for step, setting, before, after in rows
    ]
    return found or missing_records(case, "settings")


@judges("TOP-001")
def groups_are_megatrons(case: Case) -> list[Finding]:
    """Coordinates and members of every group, against RankGenerator."""
    # Read at once after opening, so a rank that failed later still tells why.
    return list(_other_groups(case)) or missing_records(case, "topology")


def _other_groups(case: Case) -> Iterator[Finding]:
    layout = case.cell.layout
    for rank, value in values(case, "topology"):
        if value is None:
            yield finding(case, rank, "topology", "megatron.core.parallel_state is not initialised")
            continue
        coords = topology.coords(layout, rank)
        pairs: list[tuple[str, Any, Any]] = [(f"{axis} rank", want, value[axis]) for axis, want in coords.items()]
        for kind, members in value["groups"].items():
            pairs.append((f"{kind} group", topology.group(layout, kind, rank), list(members)))
        for what, want, got in pairs:
            if got != want:
                yield finding(case, rank, "topology", f"{what} is {got}, expected {want}", expected=want, got=got)
