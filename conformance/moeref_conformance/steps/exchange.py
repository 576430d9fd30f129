"""Step `exchange` of the facet `dispatch`: rows to their experts and back, with gradients, watched at the experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Dispatch, Layout, RoutedRows
from moeref_conformance.contract.requests.exchange import EXCHANGES, GRADIENTS, given, local_experts, parameters


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
        self.numbers, share = local_experts(layout, rank, experts)
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
