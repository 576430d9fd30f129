"""What transformers computes with the weights that a step of the optimizer has left, as they are sent then.

OPT-010: logits in bf16 against these.
"""

from __future__ import annotations

import torch

from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.requests.optimizer import MOVED, SENT, TRAINED
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
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.placement import Placement

#: A router that chooses by less may choose otherwise by rounding: a sum in another order moves a score by 1e-6.
SURE = 1e-5
#: In bf16, where rounding turns routes, half of the tokens may have logits that are off by this share of what the step
#: moves them by. Seen, of eight families on one rank and two: 0.005 to 0.018.
SHARE = 0.05


@judges("OPT-010")
def logits_in_bf16_are_of_moved_weights(case: Case) -> Outcome:
    """Of each token the Euclidean distance, relative to that of transformers' logits before and after the step."""
    if no := unmeasured(case):
        return no
    if findings := missing_records(case, "inventory", "optimizer"):
        return outcome(findings)
    if (want := of_trained(case)) is None:
        if expected(case).plain is not None or case.cell.checkpoint_mtp:
            return Outcome(untested="judged where what is sent is all that the checkpoint has, in its dtype")
        message = "once a step has moved weights what is sent is not what ranks hold"
        return outcome([finding(case, None, "optimizer", message)])
    worst, before_BSV = 0.0, expected(case).logits_BSV
    moved_BS = distance(want.logits_BSV, before_BSV).norm(dim=-1)
    found = {record.rank: record.tensor("optimizer", f"{TRAINED}.logits") for record in records(case, "optimizer")}
    have = {rank: got_BSV for rank, got_BSV in found.items() if got_BSV is not None}
    findings += without_logits(case, "optimizer", have, "logits once a step has moved weights")
    for rank, got_BSV in have.items():
        if got_BSV.shape != before_BSV.shape:
            message = f"logits are {list(got_BSV.shape)}, transformers' {list(before_BSV.shape)}"
            findings.append(finding(case, rank, "optimizer", message))
            continue
        share = float((distance(want.logits_BSV, got_BSV).norm(dim=-1) / moved_BS)[tokens_of(case)].median())
        worst = max(worst, share)
        if not share <= SHARE:
            message = "once a step has moved weights logits are off transformers' by"
            told = f"{share:.2g} of what it moves them, of half of the tokens"
            findings.append(finding(case, rank, "optimizer", f"{message} {told}"))
    return outcome(findings, met=within(case, worst, SHARE))


@once
def of_trained(case: Case) -> routed.OfWeights | None:
    """Logits and gradients of the moved weights.

    None where no step is on record, where the checkpoint is in FP8 or INT4, or where what is sent then is not what
    ranks hold: EXP-006 tells that.
    """
    want = expected(case).tensors
    stepped = [(record, record.tensors("optimizer")) for record in records(case, "inventory", "optimizer")]
    marked = {name: tensor for _, tensors in stepped for name, tensor in tensors.items()}
    sent = {name: marked[f"{SENT}.{name}"] for name in want if f"{SENT}.{name}" in marked}
    other = len(sent) < len(want) or any(sent[name].shape != of.shape for name, of in want.items())
    if other or expected(case).plain is not None:
        return None
    placed, held_by_ranks = Placement(case.cell, expected(case).config, sent), set[str]()
    for record, tensors in stepped:
        for key, (held,) in parameters(record, placed):
            moved = tensors.get(f"{MOVED}.{key}", torch.empty(0))
            if compare(held.tensor, moved, held.rows) is not None and not less_one(case, key, held, moved):
                return None
            held_by_ranks.update(held.hf)
    if any(not torch.equal(sent[name], of) for name, of in want.items() if name not in held_by_ranks):
        return None
    return routed.of_weights(expected(case), sent)


def sure_positions(of: routed.OfWeights) -> torch.Tensor:
    """The positions [B, S] up to which no router of a row chooses by little."""
    return (of.margin_BS > SURE).cumprod(1).bool()
