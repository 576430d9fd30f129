"""Rows that the facet `dispatch` sends to their experts, and the experts' weights: small, random and in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Layout, RoutedRows

#: Width of the rows, and of the experts, which ETP 1, 2, 3, 4, 6 and 8 split evenly.
HIDDEN, INNER = 5, 24
GRADIENTS = ("x", "weights", "one", "two")


@dataclass(frozen=True)
class Exchange:
    """Rows by rank (repeated for more ranks), experts on each EP rank, experts of a row; every n-th row is padding.

    `crowd` sends all rows to the first experts, so that the others, and with EP whole ranks, stay empty.
    """

    name: str
    rows: tuple[int, ...]
    experts: int = 4
    topk: int = 2
    padding: int = 0
    crowd: bool = False


EXCHANGES = (
    Exchange("uneven, with padding", rows=(11, 6, 8, 5), padding=3),
    Exchange("empty experts and ranks", rows=(4, 0, 1), topk=3, crowd=True),
    Exchange("one expert a rank", rows=(5,), experts=1, topk=1),
    Exchange("other rows in the first shape", rows=(11, 6, 8, 5), padding=3),
    Exchange("more rows than a byte counts", rows=(301, 2), topk=1, crowd=True),
)


@dataclass(frozen=True)
class Given:
    """Rows of one rank, and the weights of their outputs in its loss."""

    rows: RoutedRows
    loss_TH: torch.Tensor


def given(exchange: Exchange, layout: Layout, dispatcher: str, rank: int, device: str = "cpu") -> Given:
    """The rows of `rank` in float64, seeded with its number. Under all-gather padding rows make all ranks equally long.

    They are drawn on the host, so that every device gets the same values.
    """
    generator = torch.Generator().manual_seed(97 * rank + EXCHANGES.index(exchange))
    count = exchange.rows[rank % len(exchange.rows)]
    rows = max(exchange.rows) if dispatcher == "allgather" else count
    experts = exchange.experts * layout.ep

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    chosen_TE = torch.arange(experts).repeat(rows, 1) if exchange.crowd else draw(rows, experts).argsort(1)
    padding_T = torch.arange(rows) >= count
    if exchange.padding:
        padding_T |= torch.arange(rows) % exchange.padding == 1
    # From 1 down to a millionth, as routers have them: what drops or rounds small weights shows.
    x_TH, weights_TK = draw(rows, HIDDEN), 10.0 ** (-6 * draw(rows, exchange.topk))
    if exchange.topk > 1:
        weights_TK[:1, -1] = 0  # a probability that underflowed: the row is sent, and its weight has a gradient
    # Slices of wider tensors, as what a router chose of all that it sorted.
    wide_TK = torch.cat([weights_TK, weights_TK], dim=1).to(device)
    return Given(
        RoutedRows(
            x_TH=x_TH.to(device).requires_grad_(),
            weights_TK=wide_TK[:, : exchange.topk].requires_grad_(),
            experts_TK=chosen_TE.to(device)[:, : exchange.topk],
            padding_T=padding_T.to(device),
            experts=experts,
        ),
        # Transposed in memory, and with it the gradient of the outputs: autograd promises no strides.
        draw(rows, HIDDEN).t().contiguous().t().to(device),
    )


def parameters(experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second weight of every expert, whole: `one_EHI` and `two_EIH`."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((experts, HIDDEN, INNER), (experts, INNER, HIDDEN))
    one_EHI, two_EIH = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return one_EHI, two_EIH


def local_experts(layout: Layout, rank: int, experts: int) -> tuple[range, slice]:
    """The experts of `rank`, and its share of their inner dimension."""
    at, local = topology.coords(layout, rank), experts // layout.ep
    width, rest = divmod(INNER, layout.expert_tp)
    if rest:
        raise ValueError(f"ETP {layout.expert_tp} does not divide experts that are {INNER} wide")
    return range(at["ep"] * local, (at["ep"] + 1) * local), slice(at["etp"] * width, (at["etp"] + 1) * width)
