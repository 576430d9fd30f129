"""Losses of routers, and where biases of experts go: by the formulas of papers, over all tokens, apart from Megatron.

With E experts, f_i is the share of the tokens' top-k choices that are expert i, and P_i the mean of its scores.
A layer's balancing loss is E · Σ f_i · P_i: in Switch Transformer (arXiv 2101.03961) over a microbatch, in DeepSeek-V3
(arXiv 2412.19437) over a sample, in "Demons in the Detail" (arXiv 2501.11873) over all tokens of a step. The z-loss of
ST-MoE (arXiv 2202.08906) is the mean of logsumexp² of the logits. Experts' bias, groups of experts and padding do not
count in losses. The bias of an expert goes up with fewer tokens than the mean, down with more (arXiv 2408.15664).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from moeref_conformance.contract.cells import ROUTER_LOSS_COEFFICIENT

Z_LOSS = "z_loss"


def added(
    kind: str,
    microbatches: Sequence[tuple[int, ...]],
    logits_LBSE: Sequence[torch.Tensor],
    top_k: int,
    sigmoid: bool,
    lengths: Sequence[int],
) -> torch.Tensor:
    """What a loss of this kind adds to that of a step: its sum over layers, its mean over microbatches.

    microbatches: the rows of each, all as many. logits_LBSE: of each layer's router, for all rows of the step, whose
    `lengths` are in tokens.
    """
    rows = [row for of in microbatches for row in of]
    parts: dict[str, Sequence[tuple[int, ...]]] = {
        "seq_aux_loss": [(row,) for row in rows],
        "global_aux_loss": [tuple(rows)],
    }
    loss = _z if kind == Z_LOSS else _balancing
    found = [
        loss(torch.cat([of_BSE[row, : lengths[row]] for row in part]), top_k, sigmoid)
        for of_BSE in logits_LBSE
        for part in parts.get(kind, microbatches)
    ]
    return ROUTER_LOSS_COEFFICIENT * len(logits_LBSE) * torch.stack(found).mean()


def directions(chosen: Collection[Collection[int]], experts: int, last: int) -> torch.Tensor:
    """Where the bias of each expert goes: 1, 0 or -1. `chosen` are the experts of each token.

    `last` tokens more may count, whatever their experts, or none of them: NaN where they decide.
    """
    counts_E = torch.tensor([expert for own in chosen for expert in own]).bincount(minlength=experts).double()
    more = last * len(next(iter(chosen))) / experts
    ways = [(counts_E.mean() - counts_E).sign()]
    ways += [(counts_E.mean() + more - counts_E - at_most).sign() for at_most in (0, last)]
    return ways[0].where((ways[0] == ways[1]) & (ways[0] == ways[2]), torch.nan)


def _balancing(logits_TE: torch.Tensor, top_k: int, sigmoid: bool) -> torch.Tensor:
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
    p_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    tokens, experts = p_TE.shape
    share_E = p_TE.topk(top_k).indices.flatten().bincount(minlength=experts) / (tokens * top_k)
    return experts * (share_E * p_TE.mean(0)).sum()


def _z(logits_TE: torch.Tensor, top_k: int, sigmoid: bool) -> torch.Tensor:
    return logits_TE.logsumexp(-1).square().mean()
