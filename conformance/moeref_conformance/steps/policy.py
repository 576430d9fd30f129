"""Facet `policy`: training steps with a policy's loss, also under given routes, and every parameter's gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Claims, Policy
from moeref_conformance.contract.requests import policy as requests
from moeref_conformance.contract.requests.logprobs import OTHER_ROUTES, ROUTES, TEMPERATURE
from moeref_conformance.contract.requests.policy import ENTROPY, REPLAYED, UNROUTED, Loss, advantages
from moeref_conformance.contract.requests.sequences import backwards
from moeref_conformance.steps import gradients, replay
from moeref_conformance.steps.facet import Context, Facet, Stage, Step
from moeref_conformance.steps.forward import heads, last_layer, scaled
from moeref_conformance.steps.recompute import recomputing


def asked(cell: Cell) -> bool:
    """Whether a cell asks: with a loss mask, and no loss of routers that take given routes or are of MTP layers.

    Whether that is over the routes or their own choice is open, and whether routers of MTP layers have one. In bf16
    under given routes alone, which rounding does not turn.
    """
    open_loss = cell.router_loss and (cell.mtp or cell.replay == "R3")
    routed = cell.replay == "R3" and gradients.trains(cell)
    return cell.loss_mask and not open_loss and (routed or gradients.asked(cell))


def claimed(claims: Claims, cell: Cell) -> bool:
    """Whether a target claims what a cell asks."""
    return claims.mtp_in_policy or not cell.mtp


def step(facet: Policy, context: Context) -> dict[str, Any] | None:
    """Save the gradients by `chunk:local`, and say how far answers are off those before the first step of this loss.

    Nothing in cells with replay R3.

    Raises TypeError for anything but fp32 tensors by (chunk, local name).
    """
    return _unrouted(facet, context, UNROUTED[0])


def plain(facet: Policy, context: Context) -> dict[str, Any] | None:
    """As `step`, where the backward pass recomputes what the forward computed; of several stages alone."""
    return _unrouted(facet, context, UNROUTED[1])


def _unrouted(facet: Policy, context: Context, name: str) -> dict[str, Any] | None:
    if context.cell.replay == "R3" or name not in requests.unrouted(context.cell):
        return None
    _saved(facet, context, name)
    return _off(context)


def replayed(facet: Policy, context: Context) -> dict[str, Any] | None:
    """As `step`, under given routes; none without them."""
    if not _routed(context):
        return None
    _saved(facet, context, REPLAYED[0])
    return _off(context)


def recomputed(facet: Policy, context: Context) -> dict[str, Any] | None:
    """As `replayed`, where the backward pass recomputes what the forward computed."""
    if not _routed(context):
        return None
    _saved(facet, context, REPLAYED[1])
    return _off(context)


def on_no_token(facet: Policy, context: Context) -> dict[str, Any]:
    """`gradients.of_no_token` of a policy's loss, under routes where they are given.

    It is the first step, of other tokens, under other routes, at other advantages and another temperature and entropy,
    and with other weights, so that what is kept of a call shows.
    """

    def ask(rows_BS: torch.Tensor, none_BS: torch.Tensor) -> Any:
        loss = Loss(TEMPERATURE, 2 * ENTROPY)
        return _asked(facet, context, backwards(rows_BS), none_BS, -advantages(rows_BS), loss, _other_routes(context))

    context.made["before_policy"] = gradients.answers(context)
    with scaled([*last_layer(context), *heads(context)]):
        return gradients.of_no_token(ask, context)


def _routed(context: Context) -> bool:
    """Whether routes are given."""
    return context.cell.replay == "R3" and "replay" in context.claims.facets


def _off(context: Context) -> dict[str, Any]:
    """How far answers are off those before any step of this facet; they are asked for without routes."""
    return {"off": gradients.off(context.made["before_policy"], context)}


def _saved(facet: Policy, context: Context, name: str) -> None:
    """Take a step and save its gradients; some recompute layers.

    Where steps update the experts' bias, other tokens come before it, in a step and in forwards without gradients.
    """
    cell, held = context.cell, load_file(context.input("tokens"))
    of_all = (held["tokens"], held["mask"], advantages(held["tokens"]))
    tokens_BS, mask_BS, advantages_BS = (
        gradients.batch(gradients.of_replica(of_BS, cell, context.rank), cell) for of_BS in of_all
    )
    rest = mask_BS, advantages_BS, requests.loss(name, cell), _routes(context)
    if cell.bias_update:
        other_BS = backwards(tokens_BS)
        _asked(facet, context, other_BS, *rest)
        gradients.without_gradients(other_BS, context)
    recompute = recomputing(cell) if requests.recomputed(name) else nullcontext
    with recompute(context.facet("export").chunks()):
        found = _asked(facet, context, tokens_BS, *rest)
    context.save(name, gradients.by_name(found))


def _asked(
    facet: Policy,
    context: Context,
    tokens_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    advantages_BS: torch.Tensor,
    loss: Loss,
    routes: list[replay.Sample] | None,
) -> Any:
    """The gradients of a step of these rows, under their routes if they are given."""
    arguments = tokens_BS, mask_BS, advantages_BS, *loss
    if routes is None:
        return facet.policy_gradients(*arguments)
    return replay.under(facet.policy_gradients, *arguments, routes=routes)


def _routes(context: Context) -> list[replay.Sample] | None:
    """The routes of the rows of this rank's step, where they are given; those of the first row come in turns."""
    if not _routed(context):
        return None
    return replay.in_turns(_of_step(context, ROUTES), _of_step(context, OTHER_ROUTES))


def _other_routes(context: Context) -> list[replay.Sample] | None:
    """Other routes of these rows."""
    return [*_of_step(context, OTHER_ROUTES)] if _routed(context) else None


def _of_step(context: Context, name: str) -> list[replay.Routes]:
    """The routes of this name of the rows of this rank's step."""
    missing = requests.missing_rows(context.cell, context.claims.missing_rows)
    of_all = replay.given(context, name, missing)
    return [of_all[row] for row in topology.step_rows(context.cell, context.rank, len(of_all))]


FACET = Facet(
    name="policy",
    protocol=Policy,
    needs=frozenset({"export"}),
    asked_in=asked,
    claimed=claimed,
    steps=(
        Step(name="policy_on_no_token", ask=on_no_token, stage=Stage.LOADED),
        Step(name=UNROUTED[0], ask=step, stage=Stage.LOADED),
        Step(name=UNROUTED[1], ask=plain, stage=Stage.LOADED),
        Step(name=REPLAYED[0], ask=replayed, stage=Stage.LOADED),
        Step(name=REPLAYED[1], ask=recomputed, stage=Stage.LOADED),
    ),
)
