"""The gradients of a policy's loss by transformers' autograd, the loss token by token in fp64.

Under given routes too, and with losses of routers added.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from moeref_conformance.contract.requests.policy import WHOLE, Loss, advantages
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.expected import Expected


def gradients(
    expected: Expected,
    routes: str = "",
    missing: bool = True,
    balancing: routed.Balancing | None = None,
    asked: Loss = WHOLE,
    dtype: torch.dtype = torch.float32,
) -> Mapping[str, torch.Tensor]:
    """The gradients of a model in `dtype`, by the checkpoint's names; NaN for a tensor that is no parameter.

    Of the loss that is `asked` for, and that of `balancing`, if there is one, added to it. Under the set of `routes` of
    that name, with or without `missing` rows; without one under the routers' own.
    """
    given = routed.given_routes(expected, routes, missing) if routes else ()
    return routed.of_loss(expected, partial(loss, expected, asked), given, balancing, dtype)


def loss(expected: Expected, asked: Loss, logits_BSV: torch.Tensor) -> torch.Tensor:
    """The mean of -(advantage · logprob + entropy · H) over the tokens that are trained on: a scalar in fp64.

    Both are of logits divided by the temperature that is asked for, as `api.Policy` says.
    """
    gains, advantages_BS = list[torch.Tensor](), advantages(expected.tokens_BS).double()
    for row, length in enumerate(expected.lengths):
        for position in range(1, length):
            if expected.mask_BS[row, position]:
                weights_V = (logits_BSV[row, position - 1].double() / asked.temperature).exp()
                shares_V = weights_V / weights_V.sum()
                logprob = shares_V[expected.tokens_BS[row, position]].log()
                drawn = -(shares_V * shares_V.log()).sum()
                gains.append(advantages_BS[row, position] * logprob + asked.entropy * drawn)
    return -torch.stack(gains).mean()
