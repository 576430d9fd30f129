"""LGP: log-probabilities and entropies of tokens against those of transformers' logits, and their digits.

Also once weights have changed in place, and under given routes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.logprobs import (
    CHANGED,
    OTHER_TEMPERATURE,
    ROUTES,
    WIDER,
    ended,
    rolled,
    temperature,
)
from moeref_conformance.contract.requests.optimizer import BEHIND, TRAINED, Behind
from moeref_conformance.diagnosis.token_values import Trial, of_others, told
from moeref_conformance.judges import Case, judges, trained
from moeref_conformance.judges.common import (
    changed,
    changed_answers,
    distance,
    expected,
    finding,
    in_any_order,
    left_by_forward,
    missing_records,
    once,
    outcome,
    records,
    tolerance,
    unmeasured,
    values,
    within,
    without_logits,
)
from moeref_conformance.judges.observed_routes import oracle
from moeref_conformance.oracles import logprobs, routed
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
#: One in ten may be farther off than this. Such values seen, of 28 cells of all families in up to 8 ranks: logprobs up
#: to 0.061, entropies to 0.0025, and once weights have changed 5.9 and 0.65. What stays 0 is off by 4.9 and 4.8; what
#: stays as the call before has left it, by 13 to 19 and 3.8. Logprobs are too near to that once weights have changed.
TENTHS = {"logprobs": 0.3, "entropies": 0.02}
TENTHS_CHANGED = {"entropies": 2.0}
#: The same of halves and of tenths under given routes, which do not turn. Seen in 7 cells of four families: logprobs
#: 0.0028 and 0.02, entropies 0.00012 and 0.00027; under the routers' own choice 0.058 and 0.18, 0.0017 and 0.005.
HALVES_ROUTED = {"logprobs": 0.02, "entropies": 0.001}
TENTHS_ROUTED = {"logprobs": 0.08, "entropies": 0.002}
#: So many times as near as the right values are others that explain wrong ones, where rounding leaves none exact.
NEARER = 4
#: Of so many samples the routes of others are tried.
SAMPLES = 4
#: What findings begin with, by what is expected.
_HOW = {"": "", CHANGED: "once weights have changed, ", ROUTES: "under given routes, "}
_HALVES = {"": HALVES, CHANGED: HALVES_CHANGED, ROUTES: HALVES_ROUTED}
_TENTHS = {"": TENTHS, CHANGED: TENTHS_CHANGED, ROUTES: TENTHS_ROUTED}


@once
def _wanted(case: Case, how: str) -> dict[str, torch.Tensor]:
    """What is expected of the weights as they were loaded, once they have `CHANGED`, and under given `ROUTES`."""
    if how == CHANGED:
        return _changed(case, OTHER_TEMPERATURE)
    logits_BSV = oracle(case, ROUTES).logits_BSV if how == ROUTES else None
    return logprobs.of_tokens(expected(case), temperature(case.cell), logits_BSV)


def _changed(case: Case, of: float) -> dict[str, torch.Tensor]:
    """What is expected of weights that have changed, with a head that is multiplied by `WIDER`."""
    return _anew(case, of, WIDER * of_changed_weights(expected(case)))


def _anew(case: Case, of: float, logits_BSV: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The values that logits, by default of the first weights, give for the tokens asked for after a change."""
    return logprobs.of_tokens(expected(case), of, logits_BSV, _tokens(case, CHANGED))


def _tokens(case: Case, how: str) -> torch.Tensor:
    """The tokens that are asked for, in the kit's order."""
    tokens_BS = expected(case).tokens_BS
    return ended(tokens_BS) if how == CHANGED else tokens_BS


def _of_rank(case: Case, rank: int, of_BS: torch.Tensor, how: str) -> torch.Tensor:
    """Tokens or values of the kit's rows in the order in which a rank was asked for them."""
    return rolled(of_BS, case.cell, rank) if how else of_BS


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
    for behind in BEHIND:
        findings += _behind_a_step(case, which, behind)
    return outcome(findings, met=within(case, compared.worst, LIMIT))


def _behind_a_step(case: Case, which: str, behind: Behind) -> Iterator[Finding]:
    """Values that are asked for once a step of an optimizer has moved weights, against those of what is sent then.

    Where routers choose by little, they and what follows in their row may be others.
    """
    if (moved := trained.of_trained(case, behind)) is None:
        return
    sure_BS = trained.sure_positions(moved)[:, :-1]
    want_BS, before_BS = (
        logprobs.of_tokens(expected(case), temperature(case.cell), of_BSV)[which].where(sure_BS, torch.nan)
        for of_BSV in (moved.logits_BSV, expected(case).logits_BSV)
    )
    for record in records(case, behind.record):
        got_BS = record.tensor(behind.record, f"{TRAINED}.{which}")
        if got_BS is None:
            continue
        if got_BS.shape != want_BS.shape:
            message = f"{which} are {list(got_BS.shape)}, expected {list(want_BS.shape)}"
            yield finding(case, record.rank, behind.record, message)
        elif not (far := _farthest(want_BS, got_BS)) <= LIMIT:
            said = "those of the weights before the step" if _farthest(before_BS, got_BS) <= LIMIT else ""
            message = f"once {behind.text} has moved weights {which} differ from transformers by {far:.2g}"
            yield finding(case, record.rank, behind.record, f"{message} > {tolerance(case, LIMIT)}", diagnosis=said)


def _farthest(want_BS: torch.Tensor, got_BS: torch.Tensor) -> float:
    """How far values are off at most, where some are wanted."""
    apart_N = distance(want_BS, got_BS)[~want_BS.isnan()]
    return float(apart_N.max()) if len(apart_N) else 0.0


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
            yield from missing_records(case, step)
            yield from without_logits(case, step, held, which)
        for rank, record in held.items():
            want_BS, got_BS = _of_rank(case, rank, _wanted(case, how)[which], how), record.tensors(step).get(name)
            if got_BS is None or got_BS.dtype != torch.float32 or got_BS.shape != want_BS.shape:
                have = "none" if got_BS is None else f"{got_BS.dtype} {list(got_BS.shape)}"
                message = f"{which} are {have}, expected torch.float32 {list(want_BS.shape)}"
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
        both = {"expected": float(want_BS[row, position]), "got": float(got_BS[row, position])}
        return finding(case, rank, self.step, message, diagnosis=_diagnosis(case, rank, which, how, got_BS), **both)


def _diagnosis(case: Case, rank: int, which: str, how: str, got_BS: torch.Tensor) -> str:
    """What values that differ are."""
    for said, other_BS in _of_others(case, rank, which, how):
        apart_BS = distance(other_BS, got_BS)[~other_BS.isnan()]
        if len(apart_BS) and bool((apart_BS <= _limit(how)).all()):
            return said
    return told(_trial(case, rank, which, how, got_BS, _limit(how)))


def _of_others(case: Case, rank: int, which: str, how: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of other weights, temperatures, routes or tokens than those that were asked for, and words for them."""

    def own(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return _of_rank(case, rank, values[which], how)

    want_BS = own(_wanted(case, how))
    if how == ROUTES:
        yield "those of the routers' own choice", own(_wanted(case, ""))
        for by in range(1, min(len(want_BS), SAMPLES)):
            under = routed.under(expected(case), ROUTES, case.claims.missing_rows, rolled=by)
            said = "those under routes of other rows, of the call before or of another replica"
            yield said, own(logprobs.of_tokens(expected(case), temperature(case.cell), under.logits_BSV))
    if how == CHANGED:
        yield "those of the weights before", own(_anew(case, OTHER_TEMPERATURE))
        said = f"those of the temperature of the call before, {temperature(case.cell):g}, not {OTHER_TEMPERATURE}"
        yield said, own(_changed(case, temperature(case.cell)))
        logits_BSV = of_changed_weights(expected(case))
        yield "those of the head before", own(_anew(case, OTHER_TEMPERATURE, logits_BSV))
        said = "those of other rows, of the call before or of another replica"
        yield said, logprobs.of_tokens(expected(case), OTHER_TEMPERATURE, WIDER * logits_BSV)[which]
        yield from ((said, want_BS.roll(by, 0)) for by in range(1, len(want_BS)))
    if _temperature(case, how) != 1.0:
        said = f"those of a temperature of 1, not {_temperature(case, how):g}"
        yield said, own(logprobs.of_tokens(expected(case), 1.0, _logits(case, how), _tokens(case, how)))
    late_BS = want_BS.roll(1, 1)
    late_BS[:, 0] = torch.nan
    yield "those of the token before", late_BS


def _trial(case: Case, rank: int, which: str, how: str, got_BS: torch.Tensor, limit: float) -> Trial:
    """What mistakes in the softmax are tried on."""
    logits_BSV, tokens_BS, want_BS = (
        _of_rank(case, rank, each, how) for each in (_logits(case, how), _tokens(case, how), _wanted(case, how)[which])
    )
    tp = case.cell.layout.tp
    return Trial(which, want_BS, got_BS, logits_BSV, tokens_BS, _temperature(case, how), limit, tp)


def _temperature(case: Case, how: str) -> float:
    """The temperature that was asked for."""
    return OTHER_TEMPERATURE if how == CHANGED else temperature(case.cell)


def _logits(case: Case, how: str) -> torch.Tensor:
    """The logits that the expected values are made of."""
    if how == CHANGED:
        return WIDER * of_changed_weights(expected(case))
    return oracle(case, ROUTES).logits_BSV if how == ROUTES else expected(case).logits_BSV


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
    yield from missing_records(case, "logprobs")
    held = _Comparison(case, "logprobs").held
    yield from without_logits(case, "logprobs", held, "logprobs")
    for rank, record in held.items():
        tensors = record.tensors("logprobs")
        for which in dict.fromkeys(["logprobs", *(name for name in tensors if not name.startswith(CHANGED))]):
            got_BS = tensors.get(which, torch.empty(0))
            values = got_BS[got_BS.isfinite()].double()
            rounded = int((values == values.bfloat16()).sum())
            if got_BS.dtype != torch.float32 or rounded > ROUNDED * len(values) or not len(values):
                share = f"{rounded} of {len(values)} {which} in {got_BS.dtype} are numbers of bfloat16"
                message = f"{share}; of a softmax in float32 hardly one would be"
                yield finding(case, rank, "logprobs", message, diagnosis="computed in bfloat16" * bool(len(values)))
            # How far right values are off in bf16 is measured on a CPU alone.
            elif which in HALVES and expected(case).logits_BSV.numel() and not in_any_order(case):
                yield from _far_by_half(case, rank, which, got_BS)
                if record.value("logprobs").get("changed"):
                    changed_BS = tensors.get(f"{CHANGED}{which}", torch.empty(0))
                    yield from _far_by_half(case, rank, which, changed_BS, CHANGED)


def _far_by_half(case: Case, rank: int, which: str, got_BS: torch.Tensor, how: str = "") -> Iterator[Finding]:
    """Values of a model in bf16 of which half or a tenth are far off, or which are not of the kit's tokens."""
    want_BS, step = _of_rank(case, rank, _wanted(case, how)[which], how), _step(how)
    if got_BS.shape != want_BS.shape:
        message = f"{_HOW[how]}{which} are {list(got_BS.shape)}, expected {list(want_BS.shape)}"
        yield finding(case, rank, step, message)
        return
    apart_N = distance(want_BS, got_BS)[~want_BS.isnan()]
    middle, limit = float(apart_N.median()), _HALVES[how][which]
    if bool(apart_N.isinf().any()):
        yield finding(case, rank, step, f"{_HOW[how]}some {which} are not finite")
    elif middle > limit:
        message = f"{_HOW[how]}half of the {which} differ from transformers by {middle:.2g} > {limit} or more"
        others = [*_of_others(case, rank, which, how), *of_others(_trial(case, rank, which, how, got_BS, limit))]
        far = [
            (float(distance(of_BS, got_BS)[~of_BS.isnan()].median()), said)
            for said, of_BS in others
            if not bool(of_BS.isnan().all())
        ]
        least, said = min(far)
        nearest = f"nearest to {said}" if least <= min(limit, middle / NEARER) else ""
        yield finding(case, rank, step, message, diagnosis=nearest)
    else:
        # Few may be far off, but more than rounding explains: a median hides them.
        tenth, limit = float(apart_N.quantile(0.9)), _TENTHS[how].get(which, math.inf)
        if tenth > limit:
            message = f"{_HOW[how]}10 % of the {which} differ from transformers by {tenth:.2g} > {limit:g} or more"
            yield finding(case, rank, step, message, diagnosis=told(_trial(case, rank, which, how, got_BS, limit)))


def _step(how: str) -> str:
    """The step that has the values."""
    return "replayed_logprobs" if how == ROUTES else "logprobs"


@judges("LGP-004")
def logprobs_under_routes_are_transformers(case: Case) -> Outcome:
    """And entropies of a target that has them, in fp32. Tokens without a route take transformers' own choice."""
    if no := unmeasured(case):
        return no
    compared, findings = _Comparison(case, "replayed_logprobs"), list[Finding]()
    for which in ("logprobs", "entropies") if case.claims.entropies else ("logprobs",):
        findings += compared.of(which, which, ROUTES)
    return outcome(findings, met=within(case, compared.worst, LIMIT))


@judges("LGP-005")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What log-probabilities have changed amid training, by kind, and in logits."""
    yield from missing_records(case, "around_logprobs", "logprobs")
    yield from changed_answers(case, "logprobs", "call of logprobs")
    for rank, rows in values(case, "around_logprobs"):
        yield from changed(case, rank, "around_logprobs", "call of logprobs", left_by_forward(case, rows or []))


@judges("LGP-006")
def logprobs_in_bf16_under_routes_are_near(case: Case) -> Outcome:
    """Medians and worst tenths, as of LGP-003 on a CPU. Given routes do not turn by rounding: limits are closer."""
    if in_any_order(case):
        return Outcome(untested="how far right values are off in bf16 is measured on a CPU alone")
    held = _Comparison(case, _step(ROUTES)).held
    findings = [*missing_records(case, _step(ROUTES)), *without_logits(case, _step(ROUTES), held, "logprobs")]
    for rank, record in held.items():
        for which in HALVES if case.claims.entropies else ("logprobs",):
            got_BS = record.tensors(_step(ROUTES)).get(which, torch.empty(0))
            findings += _far_by_half(case, rank, which, got_BS, ROUTES)
    return outcome(findings)
