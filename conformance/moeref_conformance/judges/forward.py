"""FWD: logits against transformers' own module, and against the one-rank run."""

from __future__ import annotations

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation
from moeref_conformance.diagnosis.compare import same
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    ITSELF,
    NATIVE,
    NO_BASELINE,
    distance,
    expected,
    finding,
    observed,
    outcome,
    tokens_of,
    tolerance,
    unmeasured,
    within,
    without,
)

# Largest differences seen on three kinds of CPU: 2.2e-6 and 2.4e-6, both of Qwen3-Next under TP and EP.
TRANSFORMERS = 2e-5
LAYOUT = 1e-5


def _logits(run: Observation) -> dict[int, torch.Tensor]:
    """Logits by rank, of the ranks that have them."""
    return {r.rank: r.tensors("forward")["logits"] for r in run.ranks if r.has("forward") and r.value("forward")["has"]}


def _holders(case: Case) -> list[Finding]:
    """The ranks of the last stage have logits, the others have none."""
    findings = without(case, "forward")
    if findings:
        return findings
    have, layout = _logits(observed(case)), case.cell.layout
    wrong = {True: "no logits on a rank of the last stage", False: "logits on a rank that is not of the last stage"}
    for rank in range(layout.world):
        last = topology.coords(layout, rank)["pp"] == layout.pp - 1
        if last != (rank in have):
            findings.append(finding(case, rank, "forward", wrong[last]))
    return findings


def _judge(case: Case, want: torch.Tensor, whose: str, limit: float) -> Outcome:
    """Compare the logits of every rank with `want`; bitwise if `limit` is 0."""
    findings, worst = _holders(case), 0.0
    here_BS1 = tokens_of(case)[..., None]
    want = want.where(here_BS1, 0)
    for rank, got in _logits(observed(case)).items():
        if got.shape != want.shape or got.dtype != want.dtype:
            message = f"logits are {got.dtype} {list(got.shape)}, {whose} {want.dtype} {list(want.shape)}"
            findings.append(finding(case, rank, "forward", message))
            continue
        got = got.where(here_BS1, 0)
        if same(want, got):
            continue
        apart = distance(want, got)
        far = float(apart.max())
        worst = max(worst, far)
        if far > limit:
            index = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
            by, positions = f"{far:.2g} > {tolerance(case, limit)}", apart.amax(-1)[here_BS1[..., 0]] > 0
            message = f"logits differ from {whose} by {by} at [batch, position, token] {list(index)}"
            said = _diagnosis(want, got) or f"{int(positions.sum())} of {positions.numel()} positions differ"
            told = {"expected": float(want[index]), "got": float(got[index]), "diagnosis": said}
            findings.append(finding(case, rank, "forward", message, index=index, **told))
    return outcome(findings, met=within(case, worst, limit))


def _diagnosis(want: torch.Tensor, got: torch.Tensor) -> str:
    if not got.any():
        return "all zero"
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} logits are NaN"
    if torch.allclose(got, want.flip(0), rtol=0, atol=1e-4) and want.shape[0] > 1:
        return "microbatches in reverse order"
    if torch.allclose(got[:, 1:], want[:, :-1], rtol=0, atol=1e-4):
        return "positions shifted by one"
    apart_SS = torch.cdist(got.transpose(0, 1).flatten(1), want.transpose(0, 1).flatten(1), p=torch.inf)
    nearest_S = apart_SS.argmin(1).tolist()
    in_place = list(range(len(nearest_S)))
    if float(apart_SS.amin(1).max()) <= 1e-4 and nearest_S != sorted(nearest_S) == in_place:
        return f"positions in the order {nearest_S}"
    return ""


@judges("FWD-001")
def logits_are_transformers(case: Case) -> Outcome:
    """In fp32, whatever the layout."""
    if case.cell.dtype != "float32":
        return Outcome(untested=NATIVE.format(case.cell.dtype, "RPL-004"))
    return unmeasured(case) or _judge(case, expected(case).logits_BSV, "transformers", TRANSFORMERS)


@judges("FWD-002")
def logits_are_the_one_rank_runs(case: Case) -> Outcome:
    """Bitwise where only pipeline or data parallelism differs, else within a tolerance in fp32."""
    if case.baseline is None:
        return NO_BASELINE
    one = _logits(case.baseline)
    if not one:
        return Outcome(untested="the one-rank run gave no logits")
    if case.baseline is case.observation:
        return Outcome(met=ITSELF)
    layout = case.cell.layout
    bitwise = layout.tp == layout.expert_tp == layout.ep == layout.cp == 1
    if not bitwise and case.cell.dtype != "float32":
        return Outcome(untested=NATIVE.format(case.cell.dtype, "RPL-004"))
    if not bitwise and (no := unmeasured(case)):
        return no
    return _judge(case, next(iter(one.values())), "the one-rank run", 0.0 if bitwise else LAYOUT)
