"""What the facet `policy` is asked for, under the routes of `requests.logprobs`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeref_conformance.contract.backends import GPU_BACKENDS
from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.requests.logprobs import OTHER_TEMPERATURE

#: How much an entropy counts beside an advantage of 1.
ENTROPY = 0.5
#: The steps under the routers' own choice: one that keeps activations, and of several stages one that recomputes them.
UNROUTED = ("policy", "plain_policy")
#: The same under given routes, on any layout.
REPLAYED = ("replayed_policy", "recomputed_policy")


class Loss(NamedTuple):
    """What logits are divided by, and how much an entropy counts."""

    temperature: float
    entropy: float


#: With entropies at a temperature, and what RL asks for most, for which targets may have a way of its own.
WHOLE, PLAIN = Loss(OTHER_TEMPERATURE, ENTROPY), Loss(1.0, 0.0)
#: With entropies of probabilities from nearly 1 down to those that fp32 has no number for, as trained models have them:
#: of a model of random weights at a temperature near 0. Most tokens are less likely than the 20th power of 1 / e.
PEAKED = Loss(0.01, ENTROPY)


def unrouted(cell: Cell) -> tuple[str, ...]:
    """The steps that a cell asks for without routes."""
    return UNROUTED if cell.layout.pp > 1 else UNROUTED[:1]


def missing_rows(cell: Cell, claimed: bool) -> bool:
    """Whether some tokens have no route: where a target claims these, in fp32. Rounding turns what a router chooses."""
    return claimed and cell.dtype == "float32"


def recomputed(step: str) -> bool:
    """Whether the backward pass recomputes what the forward computed."""
    return step in (UNROUTED[1], REPLAYED[1])


def loss(step: str, cell: Cell) -> Loss:
    """The loss of a step: plain where layers are recomputed, else peaked under the routers' own choice.

    Not peaked beside another loss, whose gradients would be small beside it; nor on a GPU, where the rounding of peaked
    ones is not measured.
    """
    if recomputed(step):
        return PLAIN
    whole = step in REPLAYED or cell.router_loss or cell.mtp or cell.backend in GPU_BACKENDS
    return WHOLE if whole else PEAKED


def advantages(tokens_BS: torch.Tensor) -> torch.Tensor:
    """The advantage of each token [B, S], in fp32: of both signs, and another one for neighbours in row and column.

    bf16 holds none of them exactly but 0.
    """
    rows, length = tokens_BS.shape
    of_rows_B1, of_places_S = 5 * torch.arange(rows)[:, None], 3 * torch.arange(length)
    return ((of_rows_B1 + of_places_S) % 11 - 4) / 3.7
