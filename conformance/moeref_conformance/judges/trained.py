"""What transformers computes with the weights that a step of the optimizer has left, as they are sent then."""

from __future__ import annotations

import torch

from moeref_conformance.contract.requests.optimizer import MOVED, SENT
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case
from moeref_conformance.judges.common import expected, less_one, once, parameters, records
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.placement import Placement

#: A router that chooses by less may choose otherwise by rounding: a sum in another order moves a score by 1e-6.
SURE = 1e-5


@once
def of_trained(case: Case) -> routed.OfWeights | None:
    """Logits and gradients of the moved weights.

    None where no step is on record, or where what is sent then is not what ranks hold: EXP-006 tells that.
    """
    want = expected(case).tensors
    if case.cell.dtype != "float32" or expected(case).plain is not None:
        return None
    stepped = [(record, record.tensors("optimizer")) for record in records(case, "inventory", "optimizer")]
    marked = {name: tensor for _, tensors in stepped for name, tensor in tensors.items()}
    sent = {name: marked[f"{SENT}.{name}"] for name in want if f"{SENT}.{name}" in marked}
    if len(sent) < len(want) or any(sent[name].shape != of.shape for name, of in want.items()):
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
