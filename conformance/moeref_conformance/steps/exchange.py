"""Step `exchange` of the facet `dispatch`: rows to their experts and back, with gradients, watched at the experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Dispatch, Layout, RoutedRows
from moeref_conformance.oracles import topology

#: Width of the rows, and of the experts (split over ETP).
HIDDEN, INNER = 5, 8
GRADIENTS = ("x", "weights", "one", "two")


@dataclass(frozen=True)
class Exchange:
    """Rows of each rank (by its number, in turn), experts for each EP rank, experts a row, every n-th row padding.

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
)


@dataclass(frozen=True)
class Given:
    """Rows of one rank, and how its loss weighs their outputs."""

    rows: RoutedRows
    loss_TH: torch.Tensor


def given(exchange: Exchange, layout: Layout, dispatcher: str, rank: int, device: str = "cpu") -> Given:
    """What `rank` starts with, made from its number, in float64. Under all-gather, padding makes all ranks equal.

    It is drawn on the host, so that every device gets the same.
    """
    generator = torch.Generator().manual_seed(97 * rank + EXCHANGES.index(exchange))
    count = exchange.rows[rank % len(exchange.rows)]
    rows = max(exchange.rows) if dispatcher == "allgather" else count
    experts = exchange.experts * layout.ep

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    chosen_TE = torch.arange(experts).expand(rows, -1) if exchange.crowd else draw(rows, experts).argsort(1)
    padding_T = torch.arange(rows) >= count
    if exchange.padding:
        padding_T |= torch.arange(rows) % exchange.padding == 1
    return Given(
        RoutedRows(
            x_TH=draw(rows, HIDDEN).to(device).requires_grad_(),
            weights_TK=(draw(rows, exchange.topk) + 0.1).to(device).requires_grad_(),
            experts_TK=chosen_TE[:, : exchange.topk].contiguous().to(device),
            padding_T=padding_T.to(device),
            experts=experts,
        ),
        draw(rows, HIDDEN).to(device),
    )


def parameters(experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second weight of every expert, whole: `one_EHI` and `two_EIH`."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((experts, HIDDEN, INNER), (experts, INNER, HIDDEN))
    one_EHI, two_EIH = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return one_EHI, two_EIH


def held(layout: Layout, rank: int, experts: int) -> tuple[range, slice]:
    """The experts of `rank`, and its share of their inner dimension."""
    at, local = topology.coords(layout, rank), experts // layout.ep
    width = INNER // layout.expert_tp
    return range(at["ep"] * local, (at["ep"] + 1) * local), slice(at["etp"] * width, (at["etp"] + 1) * width)


def exchanged(
    facet: Dispatch,
    cell: Cell,
    rank: int,
    save: Callable[[str, Mapping[str, torch.Tensor]], None],
    device: str = "cpu",
) -> dict[str, Any]:
    """Every exchange of EXCHANGES; outputs, counts, what every expert received and all gradients are saved.

    Rows and experts are on `device`, where the ranks' collectives take them.

    The value is what rows that no dispatcher may take were answered with (None: they were taken).
    """
    seen: dict[str, torch.Tensor] = {}
    for exchange in EXCHANGES:
        start = given(exchange, cell.layout, cell.dispatcher, rank, device)
        own = _Own(cell.layout, rank, start.rows.experts, device)
        trip = facet.round_trip(start.rows, own.expert)
        leaves = (start.rows.x_TH, start.rows.weights_TK, own.one, own.two)
        gradients = torch.autograd.grad((trip.y_TH * start.loss_TH).sum(), leaves, materialize_grads=True)
        kept = {"y": trip.y_TH, "counts": trip.counts_E, **dict(zip(GRADIENTS, gradients, strict=True))}
        kept |= {f"received.{number}": torch.cat(rows) for number, rows in own.received.items()}
        seen |= {f"{exchange.name}.{key}": tensor.detach() for key, tensor in kept.items()}
    save("exchange", seen)
    start = given(EXCHANGES[0], cell.layout, cell.dispatcher, rank, device)
    return {"refused": {what: _refusal(facet, cell, rank, rows) for what, rows in malformed(start.rows).items()}}


class _Own:
    """The experts of one rank, which remember the rows that they received."""

    def __init__(self, layout: Layout, rank: int, experts: int, device: str | torch.device) -> None:
        self.numbers, share = held(layout, rank, experts)
        one_EHI, two_EIH = parameters(experts)
        mine = slice(self.numbers.start, self.numbers.stop)
        self.one = one_EHI[mine, :, share].clone().to(device).requires_grad_()
        self.two = two_EIH[mine, share].clone().to(device).requires_grad_()
        self.received: dict[int, list[torch.Tensor]] = {}

    def expert(self, number: int, rows_RH: torch.Tensor) -> torch.Tensor:
        if number not in self.numbers:
            raise ValueError(f"expert {number} is not on this rank, which has {self.numbers}")
        self.received.setdefault(number, []).append(rows_RH.detach().clone())
        local = number - self.numbers.start
        return torch.tanh(rows_RH @ self.one[local]) @ self.two[local]


def malformed(rows: RoutedRows) -> dict[str, RoutedRows]:
    """Rows that no dispatcher may take, by what is wrong with the experts of the third."""

    def put(first: int) -> RoutedRows:
        experts_TK = rows.experts_TK.clone()
        experts_TK[2, 0] = first
        return RoutedRows(**{**vars(rows), "experts_TK": experts_TK})

    return {
        "an expert twice in a row": put(int(rows.experts_TK[2, 1])),
        "an expert that does not exist": put(rows.experts),
        "a negative expert": put(-1),
    }


def _refusal(facet: Dispatch, cell: Cell, rank: int, rows: RoutedRows) -> str | None:
    try:
        facet.round_trip(rows, _Own(cell.layout, rank, rows.experts, rows.x_TH.device).expert)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
