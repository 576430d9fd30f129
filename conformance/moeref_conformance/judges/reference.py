"""OPT-008: the logits of a reference policy beside a trained one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moeref_conformance.contract.findings import Outcome
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import ANSWERS_APART, finding, missing_records, outcome, tolerance, values, within

STEP = "optimizer_reference"


@judges("OPT-008")
def a_reference_stays_what_was_loaded(case: Case) -> Outcome:
    """Its logits against the model's own before any step, which FWD-001 judges; below fp32 routes may turn."""
    findings, worst = missing_records(case, STEP), 0.0
    for rank, when, told in _asked(case):
        for key in told["changed"]:
            message = f"{key} is not as it was before a reference policy was asked{when}"
            local = key.partition(":")[2]
            findings.append(finding(case, rank, STEP, message, local_name=local, diagnosis="not put back"))
        if told["off"] is None or case.cell.dtype != "float32":
            continue
        worst = max(worst, told["off"])
        if not told["off"] <= ANSWERS_APART:
            off = f"{told['off']:.3g} of the largest off those of the checkpoint"
            message = f"logits of the reference policy{when} are {off}"
            findings.append(finding(case, rank, STEP, message, expected=f"within {tolerance(case, ANSWERS_APART)}"))
    kept = "weights and buffers stay as they are"
    return outcome(findings, met=within(case, worst, ANSWERS_APART) if case.cell.dtype == "float32" else kept)


def _asked(case: Case) -> Iterator[tuple[int, str, Any]]:
    """Rank, when and what is told of each time that a reference policy was asked."""
    for rank, told in values(case, STEP):
        yield rank, "", told
        if "again" in told:
            yield rank, " again", told["again"]
