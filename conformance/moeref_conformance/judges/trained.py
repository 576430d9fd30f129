"""What transformers computes with the weights that a step of the optimizer has left, as they are sent then.

The first step that moves weights, and that of a restored optimizer. OPT-010: logits, log-probabilities and entropies in
bf16 against these.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.logprobs import temperature
from moeref_conformance.contract.requests.optimizer import BEHIND, SENT, TRAINED, Behind
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    distance,
    expected,
    finding,
    less_one,
    missing_records,
    once,
    outcome,
    parameters,
    records,
    tokens_of,
    unmeasured,
    within,
    without_logits,
)
from moeref_conformance.oracles import logprobs, routed
from moeref_conformance.oracles.placement import Placement

#: A router that chooses by less may choose otherwise by rounding: a sum in another order moves a score by 1e-6.
SURE = 1e-5
#: In bf16, where rounding turns routes, half of the tokens may have logits that are off by this share of what the step
#: moves them by. Seen, of eight families on one rank and two: 0.005 to 0.018.
SHARE = 0.05
#: The same of a token's values, and of what half of them move by, which is 0.0054 of entropies and 0.54 of logprobs.
#: Seen, of seven families on one rank and two: logprobs 0.0012 to 0.0036, entropies 0.0018 to 0.014.
SHARES = {"logprobs": 0.1, "entropies": 0.5}


@judges("OPT-010")
def answers_in_bf16_are_of_moved_weights(case: Case) -> Outcome:
    """Of logits the Euclidean distance of each token, relative to that of transformers' before and after the step."""
    if no := unmeasured(case):
        return no
    if findings := missing_records(case, "inventory", "optimizer"):
        return outcome(findings)
    if of_trained(case, BEHIND[0]) is None:
        if expected(case).plain is not None or case.cell.checkpoint_mtp:
            return Outcome(untested="judged where what is sent is all that the checkpoint has, in its dtype")
        message = "once a step has moved weights what is sent is not what ranks hold"
        return outcome([finding(case, None, "optimizer", message)])
    worst = 0.0
    for behind in BEHIND:
        more, share = _logits(case, behind)
        findings, worst = [*findings, *more, *_of_tokens(case, behind)], max(worst, share)
    return outcome(findings, met=within(case, worst, SHARE))


def _logits(case: Case, behind: Behind) -> tuple[list[Finding], float]:
    """Findings of the logits behind a step, and how far the farthest are off; none without what is expected of them."""
    if (want := of_trained(case, behind)) is None:
        return [], 0.0
    worst, before_BSV, step = 0.0, expected(case).logits_BSV, behind.record
    moved_BS = distance(want.logits_BSV, before_BSV).norm(dim=-1)
    found = {record.rank: record.tensor(step, f"{TRAINED}.logits") for record in records(case, step)}
    have = {rank: got_BSV for rank, got_BSV in found.items() if got_BSV is not None}
    findings = [*without_logits(case, step, have, f"logits once {behind.text} has moved weights")]
    for rank, got_BSV in have.items():
        if got_BSV.shape != before_BSV.shape:
            message = f"logits are {list(got_BSV.shape)}, transformers' {list(before_BSV.shape)}"
            findings.append(finding(case, rank, step, message))
            continue
        share = float((distance(want.logits_BSV, got_BSV).norm(dim=-1) / moved_BS)[tokens_of(case)].median())
        worst = max(worst, share)
        if not share <= SHARE:
            message = f"once {behind.text} has moved weights logits are off transformers' by"
            told = f"{share:.2g} of what it moves them, of half of the tokens"
            findings.append(finding(case, rank, step, f"{message} {told}"))
    return findings, worst


def _of_tokens(case: Case, behind: Behind) -> Iterator[Finding]:
    """As `_logits`, of log-probabilities and entropies, where the target is asked for them."""
    if (moved := of_trained(case, behind)) is None:
        return
    want, before = (
        logprobs.of_tokens(expected(case), temperature(case.cell), of_BSV)
        for of_BSV in (moved.logits_BSV, expected(case).logits_BSV)
    )
    for record in records(case, behind.record):
        for which, limit in SHARES.items():
            got_BS, want_BS = record.tensor(behind.record, f"{TRAINED}.{which}"), want[which]
            if got_BS is None:
                continue
            if got_BS.shape != want_BS.shape:
                message = f"{which} are {list(got_BS.shape)}, expected {list(want_BS.shape)}"
                yield finding(case, record.rank, behind.record, message)
                continue
            off, moves = (_half(want_BS, of_BS) for of_BS in (got_BS, before[which]))
            if not off <= limit * moves:
                message = f"once {behind.text} has moved weights half of the {which} are off transformers' by"
                told = f"{float(off / moves):.2g} of what it moves half of them by"
                yield finding(case, record.rank, behind.record, f"{message} {told}")


def _half(want_BS: torch.Tensor, of_BS: torch.Tensor) -> torch.Tensor:
    """What half of the values are farther off than, where some are wanted."""
    return distance(want_BS, of_BS)[~want_BS.isnan()].median()


@once
def of_trained(case: Case, behind: Behind) -> routed.OfWeights | None:
    """Logits and gradients of the weights that a step has moved.

    None where no step is on record, where the checkpoint is in FP8 or INT4, or where what is sent then is not what
    ranks hold: EXP-006 tells that.
    """
    want = expected(case).tensors
    stepped = [(record, record.tensors(behind.record)) for record in records(case, "inventory", behind.record)]
    marked = {name: tensor for _, tensors in stepped for name, tensor in tensors.items()}
    sent = {name: marked[f"{SENT}.{name}"] for name in want if f"{SENT}.{name}" in marked}
    other = len(sent) < len(want) or any(sent[name].shape != of.shape for name, of in want.items())
    if other or expected(case).plain is not None:
        return None
    placed, held_by_ranks = Placement(case.cell, expected(case).config, sent), set[str]()
    for record, tensors in stepped:
        for key, (held,) in parameters(record, placed):
            moved = tensors.get(f"{behind.moved}.{key}", torch.empty(0))
            if compare(held.tensor, moved, held.rows) is not None and not less_one(case, key, held, moved):
                return None
            held_by_ranks.update(held.hf)
    if any(not torch.equal(sent[name], of) for name, of in want.items() if name not in held_by_ranks):
        return None
    return routed.of_weights(expected(case), sent)


def sure_positions(of: routed.OfWeights) -> torch.Tensor:
    """The positions [B, S] up to which no router of a row chooses by little."""
    return (of.margin_BS > SURE).cumprod(1).bool()
