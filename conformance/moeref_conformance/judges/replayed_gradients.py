"""RPL-008: gradients of training steps under given routes, against the one-rank run's under the same routes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    ITSELF,
    NO_BASELINE,
    expected,
    finding,
    observed,
    one_rank,
    outcome,
    unmeasured,
    within,
    without,
)
from moeref_conformance.judges.gradients import LIMIT, against, missing, pairs
from moeref_conformance.oracles.gradients import full_gradients
from moeref_conformance.oracles.placement import Placement

#: Relative distance of all gradients of a rank. Tiny models have 0.017 in bf16, and 0.073 where steps are not replayed.
BF16 = 0.05
PHASES = ("step-a", "recompute-b")


@judges("RPL-008")
def replayed_gradients_are_the_one_rank_runs(case: Case) -> Outcome:
    """In fp32 by parameter as GRD-001, in bf16 by the Euclidean distance of all gradients of a rank."""
    one = one_rank(case, "replay")
    if one is None:
        return NO_BASELINE
    findings, worst = without(case, "inventory", "replay"), 0.0
    if findings:
        return outcome(findings)
    if case.baseline is case.observation:
        return outcome((f for phase in PHASES for f in missing(case, one, _gradients(one, phase), phase)), met=ITSELF)
    if no := unmeasured(case):
        return no
    compared, limit = (against, LIMIT) if case.cell.dtype == "float32" else (_together, BF16)
    for phase in PHASES:
        whole = full_gradients(case.cell, expected(case), _gradients(one, phase))
        oracle = Placement(case.cell, expected(case).config, whole)
        for record in observed(case).ranks:
            more, far = compared(case, oracle, record, _gradients(record, phase), phase)
            findings += more
            worst = max(worst, far)
    return outcome(findings, met=within(case, worst, limit))


def _gradients(record: RankRecord, phase: str) -> dict[str, torch.Tensor]:
    prefix = f"{phase}.gradients."
    return {k.removeprefix(prefix): t for k, t in record.tensors("replay").items() if k.startswith(prefix)}


def _together(
    case: Case, oracle: Placement, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str
) -> tuple[list[Finding], float]:
    """Compare all gradients of one rank as one vector, relative to its length. Returns findings and the distance."""
    findings, found = pairs(case, oracle, record, have, phase)
    apart = sum(float((got - want).square().sum()) for _, _, want, got in found)
    length = sum(float(want.square().sum()) for _, _, want, _ in found)
    far = float((apart / length) ** 0.5) if length else torch.inf
    if not far <= BF16:
        message = f"{phase}: the gradients are off the one-rank run's by {far:.2g} of their length > {BF16:g}"
        findings.append(finding(case, record.rank, phase, message))
    return findings, far
