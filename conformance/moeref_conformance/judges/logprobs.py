"""LGP: log-probabilities and entropies of tokens against those of transformers' logits, and their digits.

Also once weights have changed in place, and under given routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.logprobs import (
    CHANGED,
    OTHER_TEMPERATURE,
    ROUTES,
    TEMPERATURE,
    WIDER,
    turned,
)
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    behind,
    changed,
    distance,
    expected,
    finding,
    in_any_order,
    left_by_forward,
    once,
    outcome,
    records,
    tolerance,
    unmeasured,
    values,
    within,
    without,
    without_logits,
)
from moeref_conformance.judges.observed_routes import oracle
from moeref_conformance.oracles import logprobs
from moeref_conformance.oracles.routed import of_changed_weights

#: FWD-001's for logits, at the temperature that they are divided by.
LIMIT = 5e-5
#: Of values in fp32 one in 65,536 is a number of bf16 by chance.
ROUNDED = 0.5
#: In bf16 half of the values may be farther off, where rounding has turned a route. Medians seen, of eight families in
#: up to 8 ranks: logprobs 0.0021 to 0.019, entropies 0.6e-4 to 6.9e-4 (at a temperature of 1: 0.018).
HALVES = {"logprobs": 0.1, "entropies": 0.004}
#: The same once weights have changed, of a head 64 times as large. Medians seen: logprobs 0.09 to 1.3, entropies 0.007
#: to 0.1; of weights that were set aside 15 to 24, and 3.9 to 5.
HALVES_CHANGED = {"logprobs": 4.0, "entropies": 0.4}
#: What findings begin with, by what is expected.
_HOW = {"": "", CHANGED: "once weights have changed, ", ROUTES: "under given routes, "}


@once
def _wanted(case: Case, of: str) -> dict[str, torch.Tensor]:
    """What is expected of the weights as they were loaded, once they have `CHANGED`, and under given `ROUTES`."""
    if of == CHANGED:
        return _changed(case, OTHER_TEMPERATURE)
    return logprobs.of_tokens(expected(case), TEMPERATURE, oracle(case, ROUTES).logits_BSV if of == ROUTES else None)


def _changed(case: Case, temperature: float) -> dict[str, torch.Tensor]:
    """Those of weights that have changed, with a head that is multiplied by `WIDER`."""
    return logprobs.of_tokens(expected(case), temperature, WIDER * of_changed_weights(expected(case)))


def _of_rank(case: Case, rank: int, of_BS: torch.Tensor, how: str) -> torch.Tensor:
    """Of the rows as a rank was asked for them."""
    return turned(of_BS, case.cell, rank) if how else of_BS


def _limit(how: str) -> float:
    """The tolerance: errors of logits grow with the head."""
    return LIMIT * (abs(WIDER) if how == CHANGED else 1)


def _judge(case: Case, which: str) -> Outcome:
    """Compare the `logprobs` or `entropies` of every rank that has them, as those of the last stage have to."""
    if no := unmeasured(case):
        return no
    compared = _Comparison(case, "logprobs")
    findings = [*compared.of(which, which, "")]
    held = {record.rank: record for record in compared.held.values() if record.value("logprobs").get("changed")}
    findings += compared.of(which, f"{CHANGED}{which}", CHANGED, held)
    return outcome(findings, met=within(case, compared.worst, LIMIT))


@dataclass
class _Comparison:
    """The values of a step against transformers'. `worst` is how far any was off."""

    case: Case
    step: str
    worst: float = 0.0

    @property
    def held(self) -> dict[int, RankRecord]:
        """The ranks that have values."""
        return {one.rank: one for one in records(self.case, self.step) if (one.value(self.step) or {}).get("has")}

    def of(self, which: str, name: str, how: str, held: Mapping[int, RankRecord] | None = None) -> Iterator[Finding]:
        """Findings of the tensors `name`, on the ranks `held`; without these on all that have values."""
        case, step = self.case, self.step
        if held is None:
            held = self.held
            yield from without(case, step)
            yield from without_logits(case, step, held, which)
        for rank, record in held.items():
            want_BS, got_BS = _of_rank(case, rank, _wanted(case, how)[which], how), record.tensors(step).get(name)
            if got_BS is None or got_BS.dtype != torch.float32 or got_BS.shape != want_BS.shape:
                told = "none" if got_BS is None else f"{got_BS.dtype} {list(got_BS.shape)}"
                message = f"{which} are {told}, expected torch.float32 {list(want_BS.shape)}"
                yield finding(case, rank, step, f"{_HOW[how]}{message}")
                continue
            apart_BS = distance(want_BS, got_BS).where(~want_BS.isnan(), 0.0)
            far = float(apart_BS.max())
            self.worst = max(self.worst, far * LIMIT / _limit(how))
            if far > _limit(how):
                yield self._off(rank, which, how, got_BS, apart_BS)

    def _off(self, rank: int, which: str, how: str, got_BS: torch.Tensor, apart_BS: torch.Tensor) -> Finding:
        """The finding of a rank whose values differ too much."""
        case, want_BS = self.case, _of_rank(self.case, rank, _wanted(self.case, how)[which], how)
        row, position = divmod(int(apart_BS.argmax()), apart_BS.shape[1])
        by = f"{float(apart_BS.max()):.2g} > {tolerance(case, _limit(how))}"
        message = f"{_HOW[how]}{which} differ from transformers by {by}, at token {position + 1} of row {row}"
        told = {"expected": float(want_BS[row, position]), "got": float(got_BS[row, position])}
        return finding(case, rank, self.step, message, diagnosis=_diagnosis(case, rank, which, how, got_BS), **told)


def _diagnosis(case: Case, rank: int, which: str, how: str, got_BS: torch.Tensor) -> str:
    """What values that differ are."""

    def own(of: dict[str, torch.Tensor]) -> torch.Tensor:
        return _of_rank(case, rank, of[which], how)

    def near(want_BS: torch.Tensor, got_BS: torch.Tensor) -> bool:
        return bool(((distance(want_BS, got_BS) <= _limit(how)) | want_BS.isnan()).all())

    want_BS = own(_wanted(case, how))
    if how == ROUTES and near(own(_wanted(case, "")), got_BS):
        return "those of the routers' own choice"
    if how == CHANGED and near(own(logprobs.of_tokens(expected(case), OTHER_TEMPERATURE)), got_BS):
        return "those of the weights before"
    if how == CHANGED and near(own(_changed(case, TEMPERATURE)), got_BS):
        return f"those of the temperature of the call before, {TEMPERATURE}, not {OTHER_TEMPERATURE}"
    if how == CHANGED and any(near(want_BS.roll(by, 0), got_BS) for by in range(1, len(want_BS))):
        return "those of other rows, of the call before or of another replica"
    if not how and near(own(logprobs.of_tokens(expected(case), 1.0)), got_BS):
        return f"those of a temperature of 1, not {TEMPERATURE}"
    if near(want_BS[:, :-1], got_BS[:, 1:]):
        return "those of the token before"
    off_BS = (want_BS - got_BS)[~want_BS.isnan()]
    if float(off_BS.min()) > _limit(how):
        return f"too low at every token, by {float(off_BS.min()):.2g} to {float(off_BS.max()):.2g}"
    return ""


@judges("LGP-001")
def logprobs_are_transformers(case: Case) -> Outcome:
    """In fp32, whatever the layout."""
    return _judge(case, "logprobs")


@judges("LGP-002")
def entropies_are_transformers(case: Case) -> Outcome:
    """In fp32, whatever the layout."""
    return _judge(case, "entropies")


@judges("LGP-003")
def logprobs_have_the_digits_of_fp32(case: Case) -> Iterator[Finding]:
    """In bf16, where rounding turns routes and so changes logits. On a CPU half of them are near transformers'.

    So are those of weights that have changed, whose copies in fp32 a model in fp32 does not need.
    """
    yield from without(case, "logprobs")
    held = _Comparison(case, "logprobs").held
    yield from without_logits(case, "logprobs", held, "logprobs")
    for rank, record in held.items():
        found = record.tensors("logprobs")
        for which in dict.fromkeys(["logprobs", *(name for name in found if not name.startswith(CHANGED))]):
            got_BS = found.get(which, torch.empty(0))
            values = got_BS[got_BS.isfinite()].double()
            rounded = int((values == values.bfloat16()).sum())
            if got_BS.dtype != torch.float32 or rounded > ROUNDED * len(values) or not len(values):
                of = f"{rounded} of {len(values)} {which} in {got_BS.dtype} are numbers of bfloat16"
                message = f"{of}; of a softmax in float32 hardly one would be"
                yield finding(case, rank, "logprobs", message, diagnosis="computed in bfloat16" * bool(len(values)))
            # How far right values are off in bf16 is measured on a CPU alone.
            elif which in HALVES and expected(case).logits_BSV.numel() and not in_any_order(case):
                yield from _far_by_half(case, rank, which, got_BS)
                if record.value("logprobs").get("changed"):
                    yield from _far_by_half(case, rank, which, found.get(f"{CHANGED}{which}", torch.empty(0)), CHANGED)


def _far_by_half(case: Case, rank: int, which: str, got_BS: torch.Tensor, how: str = "") -> Iterator[Finding]:
    """Values of a model in bf16 of which more than half are far off, or which are not of the kit's tokens."""
    want_BS = _of_rank(case, rank, _wanted(case, how)[which], how)
    if got_BS.shape != want_BS.shape:
        message = f"{_HOW[how]}{which} are {list(got_BS.shape)}, expected {list(want_BS.shape)}"
        yield finding(case, rank, "logprobs", message)
        return
    apart_N = distance(want_BS, got_BS)[~want_BS.isnan()]
    middle, limit = float(apart_N.median()), (HALVES_CHANGED if how else HALVES)[which]
    if bool(apart_N.isinf().any()):
        yield finding(case, rank, "logprobs", f"{_HOW[how]}some {which} are not finite")
    elif middle > limit:
        message = f"{_HOW[how]}half of the {which} differ from transformers by {middle:.2g} > {limit} or more"
        yield finding(case, rank, "logprobs", message)


@judges("LGP-004")
def logprobs_under_routes_are_transformers(case: Case) -> Outcome:
    """And entropies, of a target that has them, in fp32. Tokens without a route take transformers' own choice."""
    if no := unmeasured(case):
        return no
    compared, findings = _Comparison(case, "replayed_logprobs"), list[Finding]()
    for which in ("logprobs", "entropies") if case.claims.entropies else ("logprobs",):
        findings += compared.of(which, which, ROUTES)
    return outcome(findings, met=within(case, compared.worst, LIMIT))


@judges("LGP-005")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What log-probabilities have changed amid training, by kind, and in logits."""
    yield from without(case, "around_logprobs", "logprobs")
    yield from behind(case, "logprobs", "call of logprobs")
    for rank, rows in values(case, "around_logprobs"):
        yield from changed(case, rank, "around_logprobs", "call of logprobs", left_by_forward(case, rows or []))
