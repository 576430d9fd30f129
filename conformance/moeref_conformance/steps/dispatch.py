"""Facet `dispatch`: padded lengths, the settings of dispatchers, and round trips of rows to their experts."""

from __future__ import annotations

from typing import Any

import torch

from moeref_conformance.contract.api import Dispatch, DispatcherRequest, Layout, RoutedRows, to_plain
from moeref_conformance.contract.requests.dispatch import CHOICES, requests
from moeref_conformance.contract.requests.exchange import EXCHANGES, GRADIENTS, given, local_experts, parameters
from moeref_conformance.steps.facet import Context, Facet, Static, Step, answer, refusal


def padded(dispatch: Dispatch, context: Context) -> list[dict[str, Any]]:
    """The answer to every request of `requests`, in order: `samples` and `totals`, or `refused`."""
    return [to_plain(answer(dispatch.padded, request)) for request in requests(context.cell.layout)]


def chosen(dispatch: Dispatch, context: Context) -> dict[str, dict[str, Any]]:
    """The answer to every request of CHOICES: `given`, or `refused`."""

    def settings(request: DispatcherRequest) -> dict[str, Any]:
        return {"given": dict(dispatch.settings(request))}

    return {name: to_plain(answer(settings, request)) for name, request in CHOICES.items()}


def exchanged(dispatch: Dispatch, context: Context) -> dict[str, Any]:
    """Every exchange of EXCHANGES. Saves outputs, counts, the rows that every expert received, and all gradients.

    Rows and experts are on the rank's device, as collectives need. The value has the refusal of each set of malformed
    rows; None if they were dispatched.
    """
    cell, rank, device = context.cell, context.rank, context.world.device
    observed: dict[str, torch.Tensor] = {}
    # All forwards before the first backward pass, as microbatches in a pipeline: what a dispatcher keeps is of many.
    under_way = []
    for exchange in EXCHANGES:
        start = given(exchange, cell.layout, cell.dispatcher, rank, device)
        experts = LocalExperts(cell.layout, rank, start.rows.experts, device)
        trip = dispatch.round_trip(start.rows, experts.compute)
        # Before the backward pass, in which a target that saves memory computes its experts once more.
        received = {f"received.{number}": torch.cat(rows) for number, rows in experts.received.items()}
        under_way.append((exchange.name, start, experts, trip, received))
    for name, start, experts, trip, received in under_way:
        leaves = (start.rows.x_TH, start.rows.weights_TK, experts.one, experts.two)
        gradients = torch.autograd.grad((trip.y_TH * start.loss_TH).sum(), leaves, materialize_grads=True)
        kept = {"y": trip.y_TH, "counts": trip.counts_E, **dict(zip(GRADIENTS, gradients, strict=True)), **received}
        observed |= {f"{name}.{key}": tensor.detach() for key, tensor in kept.items()}
    context.save("exchange", observed)
    rows = given(EXCHANGES[0], cell.layout, cell.dispatcher, rank, device).rows

    def sent(wrong: RoutedRows) -> None:
        dispatch.round_trip(wrong, LocalExperts(cell.layout, rank, wrong.experts, device).compute)

    return {"refused": {what: refusal(sent, wrong) for what, wrong in malformed(rows).items()}}


class LocalExperts:
    """The experts of one rank, or its shares of them under ETP. They keep the rows that they received."""

    def __init__(self, layout: Layout, rank: int, experts: int, device: str | torch.device) -> None:
        self.numbers, share = local_experts(layout, rank, experts)
        one_EHI, two_EIH = parameters(experts)
        local = slice(self.numbers.start, self.numbers.stop)
        self.one = one_EHI[local, :, share].clone().to(device).requires_grad_()
        self.two = two_EIH[local, share].clone().to(device).requires_grad_()
        self.received: dict[int, list[torch.Tensor]] = {}

    def compute(self, number: int, rows_RH: torch.Tensor) -> torch.Tensor:
        """The output of the expert of this global number. Raises ValueError for an expert of another rank."""
        if number not in self.numbers:
            raise ValueError(f"expert {number} is not on this rank, which has {self.numbers}")
        self.received.setdefault(number, []).append(rows_RH.detach().clone())
        local = number - self.numbers.start
        return torch.tanh(rows_RH @ self.one[local]) @ self.two[local]


def malformed(rows: RoutedRows) -> dict[str, RoutedRows]:
    """Rows that a dispatcher must refuse, by what is wrong with the experts of the third row."""

    def put(first: int) -> RoutedRows:
        experts_TK = rows.experts_TK.clone()
        experts_TK[2, 0] = first
        return RoutedRows(**{**vars(rows), "experts_TK": experts_TK})

    return {
        "an expert twice in a row": put(int(rows.experts_TK[2, 1])),
        "an expert that does not exist": put(rows.experts),
        "a negative expert": put(-1),
    }


FACET = Facet(
    name="dispatch",
    protocol=Dispatch,
    steps=(
        Step(name="padding", ask=padded, static=Static.ONCE),
        Step(name="dispatchers", ask=chosen, static=Static.ONCE),
        Step(name="exchange", ask=exchanged),
    ),
)
