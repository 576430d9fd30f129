"""What the facet `policy` is asked for, under the routes of `requests.logprobs`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.requests.logprobs import OTHER_TEMPERATURE

#: How much an entropy counts beside an advantage of 1.
ENTROPY = 0.5
#: The steps under given routes: one that keeps activations, and one that recomputes them.
REPLAYED = ("replayed_policy", "recomputed_policy")


class Loss(NamedTuple):
    """What logits are divided by, and how much an entropy counts."""

    temperature: float
    entropy: float


#: With entropies at a temperature, and what RL asks for most, for which targets may have a way of its own.
WHOLE, PLAIN = Loss(OTHER_TEMPERATURE, ENTROPY), Loss(1.0, 0.0)


def recomputed(step: str, cell: Cell) -> bool:
    """Whether the backward pass recomputes what the forward computed; in a step without routes, of several stages."""
    return step == REPLAYED[1] or (step not in REPLAYED and cell.layout.pp > 1)


def loss(step: str, cell: Cell) -> Loss:
    """The loss of a step, plain where layers are recomputed."""
    return PLAIN if recomputed(step, cell) else WHOLE


def advantages(tokens_BS: torch.Tensor) -> torch.Tensor:
    """The advantage of each token [B, S], in fp32: of both signs, and another one for neighbours in row and column.

    bf16 holds none of them exactly but 0.
    """
    rows, length = tokens_BS.shape
    of_rows_B1, of_places_S = 5 * torch.arange(rows)[:, None], 3 * torch.arange(length)
    return ((of_rows_B1 + of_places_S) % 11 - 4) / 3.7
