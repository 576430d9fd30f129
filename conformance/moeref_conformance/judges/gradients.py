"""GRD, and RPL-008: gradients of training steps against the one-rank run's, cut into shards by brute force.

RPL-008 judges steps under given routes, which the one-rank run was given too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    ITSELF,
    NO_BASELINE,
    distance,
    expected,
    finding,
    one_rank,
    outcome,
    records,
    tolerance,
    unmeasured,
    within,
    without,
)
from moeref_conformance.oracles.gradients import full_gradients
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown

LIMIT = 1e-4
#: Relative distance of all gradients of a rank. Tiny models have 0.017 in bf16, and 0.073 where steps are not replayed.
BF16 = 0.05
PHASES = ("step-a", "recompute-b")


@judges("GRD-001")
def gradients_are_the_one_rank_runs(case: Case) -> Outcome:
    """In fp32, relative to the largest gradient of the Hugging Face tensors that a parameter is made of."""
    if case.cell.dtype != "float32":
        return Outcome(untested=f"judged in fp32 only: in {case.cell.dtype} rounding turns routes without replay")
    if case.cell.mtp:
        return Outcome(untested="multi-token prediction layers have a loss of their own, which no facet states")
    one = one_rank(case, "gradients")
    if one is None:
        return NO_BASELINE
    if case.baseline is case.observation:
        return outcome(_unusable(case, one), met=ITSELF)
    return unmeasured(case) or _compared(case, one, "gradients", ("gradients",), _against, LIMIT)


@judges("RPL-008")
def replayed_gradients_are_the_one_rank_runs(case: Case) -> Outcome:
    """In fp32 by parameter as GRD-001, in bf16 by the Euclidean distance of all gradients of a rank."""
    one = one_rank(case, "replay")
    if one is None:
        return NO_BASELINE
    if findings := without(case, "inventory", "replay"):
        return outcome(findings)
    if case.baseline is case.observation:
        return outcome((f for phase in PHASES for f in _missing(case, one, _gradients(one, phase), phase)), met=ITSELF)
    compare, limit = (_against, LIMIT) if case.cell.dtype == "float32" else (_together, BF16)
    return unmeasured(case) or _compared(case, one, "replay", PHASES, compare, limit)


Compare = Callable[[Case, Placement, RankRecord, Mapping[str, torch.Tensor], str], tuple[list[Finding], float]]


def _compared(case: Case, one: RankRecord, step: str, phases: Iterable[str], compare: Compare, limit: float) -> Outcome:
    """The gradients of all ranks in these phases of a step against those of the one rank."""
    findings, worst, made = without(case, "inventory", step), 0.0, case.baseline.made if case.baseline else {}
    for phase in phases:
        # Worked out once for all layouts of the variant.
        if phase not in made:
            made[phase] = full_gradients(case.cell, expected(case), _gradients(one, phase))
        oracle = Placement(case.cell, expected(case).config, made[phase])
        for record in records(case, "inventory", step):
            more, far = compare(case, oracle, record, _gradients(record, phase), phase)
            findings += more
            worst = max(worst, far)
    return outcome(findings, met=within(case, worst, limit))


def _gradients(record: RankRecord, phase: str) -> dict[str, torch.Tensor]:
    if phase == "gradients":
        return record.tensors("gradients")
    prefix = f"{phase}.gradients."
    return {k.removeprefix(prefix): t for k, t in record.tensors("replay").items() if k.startswith(prefix)}


def _missing(
    case: Case, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str = "gradients"
) -> list[Finding]:
    """Parameters without a gradient."""
    return [
        finding(case, record.rank, phase, f"no gradient of {item['local']}", local_name=item["local"])
        for item in record.value("inventory")
        if item["kind"] == "parameter" and f"{item['chunk']}:{item['local']}" not in have
    ]


def _unusable(case: Case, one: RankRecord) -> Iterator[Finding]:
    """Why the one-rank run cannot be compared with: gradients that are missing, not finite, or all zero."""
    have = one.tensors("gradients")
    yield from _missing(case, one, have)
    for key, tensor in have.items():
        local = key.partition(":")[2]
        if not bool(tensor.isfinite().all()):
            yield finding(case, one.rank, "gradients", f"gradient of {local} is not finite", local_name=local)
    if have and not any(bool(tensor.any()) for tensor in have.values()):
        yield finding(case, one.rank, "gradients", "all gradients are zero")


Pair = tuple[str, ExpectedShard, torch.Tensor, torch.Tensor]


def _pairs(
    case: Case, oracle: Placement, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str
) -> tuple[list[Finding], list[Pair]]:
    """Local name, shard, wanted and given gradient without padded rows; and findings for those without a pair."""
    findings, found = _missing(case, record, have, phase), list[Pair]()
    for key, got in sorted(have.items()):
        chunk, _, local = key.partition(":")
        try:
            held = oracle.shard(record.rank, int(chunk), local, list(got.shape))
        except Unknown as error:
            findings.append(finding(case, record.rank, phase, str(error), local_name=local))
        else:
            found.append((local, held, held.tensor[: held.rows], got[: held.rows].double()))
    return findings, found


def _against(
    case: Case, oracle: Placement, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str
) -> tuple[list[Finding], float]:
    """Findings of one rank, and the largest relative distance of what is right."""
    worst = 0.0
    findings, found = _pairs(case, oracle, record, have, phase)
    for local, held, want, got in found:
        # A tied head's replica names no tensor that an export reads; it is made of the embedding.
        sources = held.hf or ("model.embed_tokens.weight",)
        scale = max(oracle.largest(name) for name in sources)
        far = float(distance(want, got).max()) if got.numel() else 0.0
        far = 0.0 if far == 0.0 else far / scale if scale else torch.inf
        if far <= LIMIT:
            worst = max(worst, far)
            continue
        off = f"{far:.2g} of its largest > {tolerance(case, LIMIT)}"
        message, said = f"the gradient of {local} is off the one-rank run's by {off}", _diagnosis(want, got)
        findings.append(
            finding(case, record.rank, phase, message, hf_name=sources[0], local_name=local, diagnosis=said)
        )
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


def _together(
    case: Case, oracle: Placement, record: RankRecord, have: Mapping[str, torch.Tensor], phase: str
) -> tuple[list[Finding], float]:
    """Compare all gradients of one rank as one vector, relative to its length. Returns findings and the distance."""
    findings, found = _pairs(case, oracle, record, have, phase)
    apart = sum(float((got - want).square().sum()) for _, _, want, got in found)
    length = sum(float(want.square().sum()) for _, _, want, _ in found)
    far = float((apart / length) ** 0.5) if length else torch.inf
    if not far <= BF16:
        message = f"{phase}: the gradients are off the one-rank run's by {far:.2g} of their length > {BF16:g}"
        findings.append(finding(case, record.rank, phase, message))
    return findings, far
