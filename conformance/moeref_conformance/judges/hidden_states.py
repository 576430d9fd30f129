"""From where on hidden states are not transformers': what a finding about logits says of its cause."""

from __future__ import annotations

import torch

from moeref_conformance.judges import Case
from moeref_conformance.judges.common import expected, observed, once, tokens_of
from moeref_conformance.oracles.hidden_states import entering_norms

#: Hidden states of a token that are further apart, relative to their length, differ. Rounding is below a tenth of it.
APART = 1e-5
#: Logits that are this far off are so by more than hidden states that may not be told from rounding.
FAR = 5e-5
NOWHERE = "hidden states agree up to the last norm"


def differ(case: Case, step: str, key: str, far: float, routes: str = "") -> str:
    """What hidden states say of logits in fp32 that are so `far` off; empty if nothing.

    In the records of `step`, `key` has what entered norms in a forward of the cell's tokens, under the route set
    `routes` where there is one.
    """
    since = _since(case, step, key, routes)
    return since if since != NOWHERE or far > FAR else ""


@once
def _since(case: Case, step: str, key: str, routes: str) -> str:
    """From where on hidden states that enter norms differ; empty if a norm has none on record.

    Those of a token may be on any rank, in any order: sequence parallelism, CP, replicas and microbatches divide them.
    """
    here_BS, records = tokens_of(case), [record.tensors(step) for record in observed(case).ranks if record.has(step)]
    want = entering_norms(expected(case), routes, case.claims.missing_rows)
    for number, want_BSH in enumerate(want):
        name = f"{key}.{'last' if number == len(want) - 1 else number}"
        rows = [record[name].double() for record in records if name in record]
        if not rows or any(rows_TH.shape[1] != want_BSH.shape[2] for rows_TH in rows):
            return ""
        want_TH, got_TH = want_BSH[here_BS].double(), torch.cat(rows)
        apart_TT = torch.cdist(got_TH, want_TH) / want_TH.norm(dim=1)
        # Rows of padding are nowhere in transformers.
        apart = [apart_TT.amin(0).max(), *([apart_TT.amin(1).max()] if here_BS.all() else [])]
        if not all(far <= APART for far in apart):
            return f"hidden states differ from {_before(number)} on"
    return NOWHERE


def _before(number: int) -> str:
    """What comes before this norm."""
    if not number:
        return "the embedding"
    return f"the attention of layer {number // 2}" if number % 2 else f"the MLP or MoE of layer {number // 2 - 1}"
