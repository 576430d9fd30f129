"""LGP: log-probabilities and entropies of tokens against those of transformers' logits, and their digits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.logprobs import TEMPERATURE
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    distance,
    expected,
    finding,
    once,
    outcome,
    records,
    tolerance,
    unmeasured,
    within,
    without,
    without_logits,
)
from moeref_conformance.oracles import logprobs as oracle

#: FWD-001's for logits, at the temperature that they are divided by.
LIMIT = 5e-5
#: Of values in fp32 one in 65,536 is a number of bf16 by chance.
ROUNDED = 0.5


@once
def _wanted(case: Case) -> dict[str, torch.Tensor]:
    return oracle.of_tokens(expected(case), TEMPERATURE)


def _judge(case: Case, which: str) -> Outcome:
    """Compare the `logprobs` or `entropies` of every rank that has them, as those of the last stage have to."""
    if no := unmeasured(case):
        return no
    findings = without(case, "logprobs")
    held = {record.rank: record for record in records(case, "logprobs") if record.value("logprobs")["has"]}
    findings += without_logits(case, "logprobs", held, which)
    want_BS, worst = _wanted(case)[which], 0.0
    for rank, record in held.items():
        got_BS = record.tensors("logprobs").get(which)
        if got_BS is None or got_BS.dtype != torch.float32 or got_BS.shape != want_BS.shape:
            told = "none" if got_BS is None else f"{got_BS.dtype} {list(got_BS.shape)}"
            message = f"{which} are {told}, expected torch.float32 {list(want_BS.shape)}"
            findings.append(finding(case, rank, "logprobs", message))
            continue
        apart_BS = distance(want_BS, got_BS).where(~want_BS.isnan(), 0.0)
        worst = max(worst, far := float(apart_BS.max()))
        if far > LIMIT:
            findings.append(_off(case, rank, which, want_BS, got_BS, apart_BS))
    return outcome(findings, met=within(case, worst, LIMIT))


def _off(
    case: Case, rank: int, which: str, want_BS: torch.Tensor, got_BS: torch.Tensor, apart_BS: torch.Tensor
) -> Finding:
    """The finding of a rank whose values differ too much."""
    row, position = divmod(int(apart_BS.argmax()), apart_BS.shape[1])
    by = f"{float(apart_BS.max()):.2g} > {tolerance(case, LIMIT)}"
    message = f"{which} differ from transformers by {by}, at token {position + 1} of row {row}"
    told = {"expected": float(want_BS[row, position]), "got": float(got_BS[row, position])}
    return finding(case, rank, "logprobs", message, diagnosis=_diagnosis(case, which, want_BS, got_BS), **told)


def _diagnosis(case: Case, which: str, want_BS: torch.Tensor, got_BS: torch.Tensor) -> str:
    """What values that differ are."""

    def near(want_BS: torch.Tensor, got_BS: torch.Tensor) -> bool:
        return bool(((distance(want_BS, got_BS) <= LIMIT) | want_BS.isnan()).all())

    if near(oracle.of_tokens(expected(case), 1.0)[which], got_BS):
        return f"those of a temperature of 1, not {TEMPERATURE}"
    if near(want_BS[:, :-1], got_BS[:, 1:]):
        return "those of the token before"
    off_BS = (want_BS - got_BS)[~want_BS.isnan()]
    if float(off_BS.min()) > LIMIT:
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
    """In bf16, where rounding turns routes and so changes logits."""
    yield from without(case, "logprobs")
    held = {one.rank: one.tensors("logprobs") for one in records(case, "logprobs") if one.value("logprobs")["has"]}
    yield from without_logits(case, "logprobs", held, "logprobs")
    for rank, found in held.items():
        for which, got_BS in {"logprobs": torch.empty(0), **found}.items():
            values = got_BS[got_BS.isfinite()].double()
            rounded = int((values == values.bfloat16()).sum())
            if got_BS.dtype != torch.float32 or rounded > ROUNDED * len(values) or not len(values):
                of = f"{rounded} of {len(values)} {which} in {got_BS.dtype} are numbers of bfloat16"
                message = f"{of}; of a softmax in float32 hardly one would be"
                yield finding(case, rank, "logprobs", message, diagnosis="computed in bfloat16" * bool(len(values)))
