"""GRD: gradients after one training step, against the one-rank run's gradients cut into shards by brute force."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    expected,
    finding,
    observed,
    outcome,
    tolerance,
    unmeasured,
    within,
    without,
)
from moeref_conformance.oracles.gradients import full_gradients
from moeref_conformance.oracles.placement import Placement, Unknown

LIMIT = 1e-4


@judges("GRD-001")
def gradients_are_the_one_rank_runs(case: Case) -> Outcome:
    """In fp32, relative to the largest gradient of the Hugging Face tensors that a parameter is made of."""
    if case.cell.dtype != "float32":
        return Outcome(untested=f"judged in fp32 only: in {case.cell.dtype} rounding turns routes without replay")
    if case.cell.mtp:
        return Outcome(untested="multi-token prediction layers have a loss of their own, which no facet states")
    one = case.baseline.ranks[0] if case.baseline is not None and case.baseline.ranks else None
    if one is None or not one.has("gradients"):
        return Outcome(untested="there is no one-rank run of this variant to compare with")
    if case.baseline is case.observation:
        return outcome(_unusable(case, one), met="the one-rank run itself")
    if no := unmeasured(case):
        return no
    oracle = Placement(case.cell, expected(case).config, _whole(case, one))
    findings, worst = without(case, "inventory", "gradients"), 0.0
    for record in observed(case).ranks:
        if record.has("inventory") and record.has("gradients"):
            more, far = against(case, oracle, record, record.tensors("gradients"))
            findings += more
            worst = max(worst, far)
    return outcome(findings, met=within(case, worst, LIMIT) if worst else "exact")


def _whole(case: Case, one: RankRecord) -> dict[str, torch.Tensor]:
    """The one-rank run's gradients by Hugging Face name, worked out once for all layouts of its variant."""
    if case.baseline is None:
        raise ValueError(f"cell {case.cell.id}: no one-rank run to compare with")
    if "gradients" not in case.baseline.made:
        case.baseline.made["gradients"] = full_gradients(case.cell, expected(case), one.tensors("gradients"))
    made: dict[str, torch.Tensor] = case.baseline.made["gradients"]
    return made


def missing(
    case: Case, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str = "gradients"
) -> list[Finding]:
    """Parameters without a gradient."""
    names = [(i["chunk"], i["local"]) for i in record.value("inventory") if i["kind"] == "parameter"]
    return [
        finding(case, record.rank, phase, f"no gradient of {local}", local_name=local)
        for chunk, local in names
        if f"{chunk}:{local}" not in have
    ]


def _unusable(case: Case, one: RankRecord) -> list[Finding]:
    """Why the one-rank run cannot be compared with: gradients that are missing, not finite, or all zero."""
    have = one.tensors("gradients")
    findings = missing(case, one, have)
    for key, tensor in have.items():
        local = key.partition(":")[2]
        if not bool(tensor.isfinite().all()):
            findings.append(
                finding(case, one.rank, "gradients", f"gradient of {local} is not finite", local_name=local)
            )
    if have and not any(bool(tensor.any()) for tensor in have.values()):
        findings.append(finding(case, one.rank, "gradients", "all gradients are zero"))
    return findings


def against(
    case: Case, oracle: Placement, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str = "gradients"
) -> tuple[list[Finding], float]:
    """Findings of one rank, and the largest relative distance of what is right."""
    findings, worst = missing(case, record, have, phase), 0.0
    for key, got in sorted(have.items()):
        chunk, _, local = key.partition(":")
        try:
            held = oracle.shard(record.rank, int(chunk), local, list(got.shape))
        except Unknown as error:
            findings.append(finding(case, record.rank, phase, str(error), local_name=local))
            continue
        # A tied head's replica names no tensor that an export reads; it is made of the embedding.
        sources = held.hf or ("model.embed_tokens.weight",)
        scale = max(oracle.largest(name) for name in sources)
        want, mine = held.tensor[: held.rows], got[: held.rows].double()
        apart = (mine - want).abs()
        far = float(torch.where(apart.isnan(), torch.inf, apart).max()) if apart.numel() else 0.0
        far = 0.0 if far == 0.0 else far / scale if scale else torch.inf
        if far <= LIMIT:
            worst = max(worst, far)
            continue
        message = (
            f"the gradient of {local} is off the one-rank run's by {far:.2g} of its largest > {tolerance(case, LIMIT)}"
        )
        more = {"hf_name": sources[0], "local_name": local, "diagnosis": _diagnosis(want, mine)}
        findings.append(finding(case, record.rank, phase, message, **more))
    return findings, worst


def _diagnosis(want: torch.Tensor, got: torch.Tensor) -> str:
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} are NaN"
    if not got.any():
        return "all zero"
    factor = float((got * want).sum() / (want * want).sum().clamp_min(1e-30))
    if torch.allclose(got, factor * want, rtol=1e-3, atol=1e-4 * float(got.abs().max())):
        return f"{factor:.3g} times the right one"
    return ""
