"""FWD: logits against transformers' own module and the one-rank run, and what a forward leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.requests.optimizer import BEHIND, LOADED, TRAINED, Behind
from moeref_conformance.diagnosis.compare import same
from moeref_conformance.judges import Case, hidden_states, judges, trained
from moeref_conformance.judges.common import (
    ANSWERS_APART,
    ITSELF,
    LAYOUT,
    NATIVE,
    NO_BASELINE,
    changed,
    distance,
    expected,
    finding,
    in_any_order,
    left_by_forward,
    missing_records,
    observed,
    only_last_stage,
    outcome,
    records,
    tokens_of,
    tolerance,
    unmeasured,
    values,
    within,
)
from moeref_conformance.oracles.routed import of_changed_weights

#: The largest difference seen on three kinds of CPU is 2.2e-6, of Qwen3-Next under TP and EP; of 72 tokens 5.5e-6.
NEAR = 2e-5
TRANSFORMERS, LOGITS = "transformers", "logits"


def _logits(run: Observation) -> dict[int, torch.Tensor]:
    """Logits by rank, of the ranks that have them."""
    held = [r for r in run.ranks if r.has("forward") and r.value("forward")["has"]]
    recorded = {r.rank: r.tensors("forward").get("logits") for r in held}
    return {rank: logits_BSV for rank, logits_BSV in recorded.items() if logits_BSV is not None}


def _shorter(run: Observation) -> Iterator[tuple[int, int, str, torch.Tensor | None]]:
    """Of the ranks that have logits, and were asked for those of a shorter sequence: rank, its length, what had become
    of weights, if anything had, and its logits."""
    for record in run.ranks:
        value = record.value("forward") if record.has("forward") else {"has": False}
        if value["has"] and value.get("shorter"):
            held, length = record.tensors("forward"), value["shorter"]
            yield record.rank, length, "have changed" if value.get("changed") else "", held.get("shorter")
            if value.get("moved"):
                yield record.rank, length, "have changed in new memory", held.get("moved")


def _holders(case: Case) -> list[Finding]:
    """The ranks of the last stage have logits, the others have none."""
    findings = missing_records(case, "forward")
    if findings:
        return findings
    return only_last_stage(case, "forward", _logits(observed(case)))


@dataclass
class _Comparison:
    """Logits against those of `whose`; bitwise if `limit` is 0. `worst` is how far any was off.

    `since` is what hidden states say of the logits of all tokens, which come first: the cause of other ones, too.
    """

    case: Case
    whose: str
    limit: float
    worst: float = 0.0
    since: str = ""

    def of(self, rank: int, want: torch.Tensor, got: torch.Tensor, what: str = LOGITS) -> Iterator[Finding]:
        """The finding of a rank whose logits differ too much."""
        if got.shape != want.shape or got.dtype != want.dtype:
            message = f"{what} are {got.dtype} {list(got.shape)}, {self.whose} {want.dtype} {list(want.shape)}"
            yield finding(self.case, rank, "forward", message)
            return
        here_BS1 = tokens_of(self.case)[:, : want.shape[1], None]
        want, got = want.where(here_BS1, 0), got.where(here_BS1, 0)
        if same(want, got):
            return
        apart = distance(want, got)
        far = float(apart.max())
        self.worst = max(self.worst, far)
        if far > self.limit:
            index = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
            by, positions = f"{far:.2g} > {tolerance(self.case, self.limit)}", apart.amax(-1)[here_BS1[..., 0]] > 0
            message = f"{what} differ from {self.whose} by {by} at [batch, position, token] {list(index)}"
            cause = _diagnosis(want, got) or f"{int(positions.sum())} of {positions.numel()} positions differ"
            if (self.whose, what) == (TRANSFORMERS, LOGITS):
                self.since = hidden_states.differ(self.case, "forward", "entering", far)
            details = {"index": index, "expected": float(want[index]), "got": float(got[index])}
            diagnosis = "; ".join(filter(None, (cause, self.since)))
            yield finding(self.case, rank, "forward", message, diagnosis=diagnosis, **details)


def _judge(case: Case, want: torch.Tensor, whose: str, limit: float, shorter: bool = False) -> Outcome:
    """Compare the logits of every rank with `want`, and those of a shorter sequence with the first of them."""
    findings, compared = _holders(case), _Comparison(case, whose, limit)
    for rank, got in _logits(observed(case)).items():
        findings += compared.of(rank, want, got)
    for rank, length, anew, again in _shorter(observed(case)) if shorter else ():
        what = f"logits of the first {length} tokens alone" + (f", once weights {anew}," if anew else "")
        of_all = of_changed_weights(expected(case)) if anew else want
        if again is None:
            findings.append(finding(case, rank, "forward", f"no {what}"))
        else:
            findings += compared.of(rank, of_all[:, :length], again, what)
    return outcome(findings, met=within(case, compared.worst, limit))


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
    if no := unmeasured(case):
        return no
    answer = _judge(case, expected(case).logits_BSV, TRANSFORMERS, NEAR, shorter=True)
    return replace(answer, findings=(*answer.findings, *_behind_steps(case)))


def _behind_steps(case: Case) -> Iterator[Finding]:
    """Logits once steps of an optimizer have moved weights, and once the checkpoint is loaded again behind them."""
    for behind in BEHIND:
        yield from _behind_a_step(case, behind)
    for record in records(case, "optimizer"):
        got, want_BSV = record.tensor("optimizer", f"{LOADED}.logits"), expected(case).logits_BSV
        if got is not None and not (far := _farthest(want_BSV, got, tokens_of(case))) <= NEAR:
            told = f"{far:.2g} > {tolerance(case, NEAR)}"
            message = f"logits once the checkpoint is loaded again differ from {TRANSFORMERS} by {told}"
            yield finding(case, record.rank, "optimizer", message)


def _behind_a_step(case: Case, behind: Behind) -> Iterator[Finding]:
    """Logits that are asked for once a step of an optimizer has moved weights, against those of what is sent then.

    Where routers choose by little, they and what follows in their row may be others.
    """
    if (want := trained.of_trained(case, behind)) is None:
        return
    here_BS = tokens_of(case) & trained.sure_positions(want)
    if not bool(here_BS.any()):
        return
    # A step may make logits larger, and rounding with them.
    limit = max(NEAR, ANSWERS_APART * float(want.logits_BSV[here_BS].abs().max()))
    for record in records(case, behind.record):
        got = record.tensor(behind.record, f"{TRAINED}.logits")
        if got is None:
            continue
        far = _farthest(want.logits_BSV, got, here_BS)
        if not far <= limit:
            told = f"{far:.2g} > {tolerance(case, limit)}"
            message = f"logits once {behind.text} has moved weights differ from {TRANSFORMERS} by {told}"
            before = _farthest(expected(case).logits_BSV, got, here_BS) <= NEAR
            said = "those of the weights before the step" if before else ""
            yield finding(case, record.rank, behind.record, message, diagnosis=said)


def _farthest(want: torch.Tensor, got: torch.Tensor, here_BS: torch.Tensor) -> float:
    """How far logits are off at most; infinitely of another shape."""
    return float(distance(want, got)[here_BS].max()) if got.shape == want.shape else float("inf")


@judges("FWD-002")
def logits_are_the_one_rank_runs(case: Case) -> Outcome:
    """Bitwise on a CPU where only pipeline or data parallelism differs, else within a tolerance in fp32."""
    if case.baseline is None:
        return NO_BASELINE
    one = _logits(case.baseline)
    if not one:
        return Outcome(untested="the one-rank run gave no logits")
    if case.baseline is case.observation:
        return Outcome(met=ITSELF)
    layout = case.cell.layout
    bitwise = layout.tp == layout.expert_tp == layout.ep == layout.cp == 1 and not in_any_order(case)
    if not bitwise and case.cell.dtype != "float32":
        return Outcome(untested=NATIVE.format(case.cell.dtype, "RPL-004"))
    if not bitwise and (no := unmeasured(case)):
        return no
    return _judge(case, next(iter(one.values())), "the one-rank run", 0.0 if bitwise else LAYOUT)


@judges("FWD-003")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What a forward has changed amid training, by kind."""
    yield from missing_records(case, "around_forward")
    for rank, rows in values(case, "around_forward"):
        yield from changed(case, rank, "around_forward", "forward", left_by_forward(case, rows))
