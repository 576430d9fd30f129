"""What each token adds to the gradient of the head, written apart: of its logprob and of its entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeref_conformance.oracles import routed
from moeref_conformance.oracles.expected import Expected


class Terms(NamedTuple):
    """Of each predicted token the hidden state [T, H] that enters the head, and the gradients [T, V] by the logits of
    its negative logprob and of its negative entropy. `places` are (sample, position) of the tokens."""

    places: list[tuple[int, int]]
    states_TH: torch.Tensor
    logprob_TV: torch.Tensor
    entropy_TV: torch.Tensor


def terms(expected: Expected, temperature: float = 1.0, routes: str = "", missing: bool = True) -> Terms:
    """The terms of all tokens in fp64; the first token of a sample is predicted from its last one.

    `routes` and `missing` are as in `routed.entering`. With p = softmax(logits / t), the gradient of -log p[y] is
    (p - onehot(y)) / t, and that of sum(p log p) is p (log p - sum(p log p)) / t.
    """
    logits_BSV, (states_BSH,) = routed.entering(expected, lambda model: [model.lm_head], routes, missing)
    places = [(row, s) for row, length in enumerate(expected.lengths) for s in range(length)]
    rows = torch.tensor([row for row, _ in places])
    before = torch.tensor([(s or expected.lengths[row]) - 1 for row, s in places])
    log_TV = (logits_BSV.double()[rows, before] / temperature).log_softmax(-1)
    tokens_T = expected.tokens_BS[rows, torch.tensor([s for _, s in places])]
    onehot_TV = torch.nn.functional.one_hot(tokens_T.long(), log_TV.shape[1])
    mean_T1 = (log_TV.exp() * log_TV).sum(-1, keepdim=True)
    logprob_TV, entropy_TV = log_TV.exp() - onehot_TV, log_TV.exp() * (log_TV - mean_T1)
    return Terms(places, states_BSH.double()[rows, before], logprob_TV / temperature, entropy_TV / temperature)
