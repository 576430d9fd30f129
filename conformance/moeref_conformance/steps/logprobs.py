"""Facet `logprobs`: log-probabilities of the kit's tokens, and entropies; again of other weights, or under routes."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Logprobs, TokenLogprobs
from moeref_conformance.contract.published_models import TINY
from moeref_conformance.contract.requests.logprobs import (
    CHANGED,
    OTHER_ROUTES,
    OTHER_TEMPERATURE,
    ROUTES,
    WIDER,
    ended,
    rolled,
    temperature,
)
from moeref_conformance.contract.requests.sequences import shorter
from moeref_conformance.steps import gradients
from moeref_conformance.steps.bystanders import amid_training
from moeref_conformance.steps.facet import Context, Facet, Stage, Step
from moeref_conformance.steps.forward import heads, last_layer, scaled
from moeref_conformance.steps.replay import given, in_turns, under


def asked(cell: Cell) -> bool:
    """Whether a cell asks: where routers choose or take given routes, and products have no recipe."""
    return not cell.precision and cell.replay in ("off", "R3")


def logprobs(facet: Logprobs, context: Context) -> dict[str, Any] | None:
    """Ask for logprobs and entropies, save them, and say whether this rank has any. None under replay.

    Raises TypeError for an answer of another type. `off` says how far the calls moved logits, in cells whose training
    steps say so too.

    The first call comes amid training, of pairs at a temperature of 1; the step `around` has what it changed there. A
    second one follows in models of one stage whose forward the oracle has. There weights are `scaled`, so that weights
    which a target set aside show; the head is `WIDER`, so that what holds for nearly equal probabilities alone shows;
    the temperature is another one, so that a kept one shows; rows are `rolled`, so that tokens show that were kept or
    are another replica's; and they are `ended`, so that a token shows that no rank takes for its own, or two.
    """
    if context.cell.replay != "off":
        return None
    tokens_BS = load_file(context.input("tokens"))["tokens"]
    chunks, before = context.facet("export").chunks(), _logits(context)
    found, left = amid_training(chunks, lambda: facet.logprobs(tokens_BS, temperature(context.cell)))
    saved = checked(found)
    layer, head = _changed(context) if shorter(tokens_BS.shape[1], context.cell) else ([], [])
    if head:
        with scaled(layer), scaled(head, WIDER):
            asked_BS = rolled(ended(tokens_BS), context.cell, context.rank)
            again = checked(facet.logprobs(asked_BS, OTHER_TEMPERATURE))
        saved |= {f"{CHANGED}{name}": of_BS for name, of_BS in again.items()}
    if saved:
        context.save("logprobs", saved)
    context.made["around_logprobs"] = left
    return {"has": bool(saved), "changed": bool(head), "off": gradients.apart(before, _logits(context))}


def _logits(context: Context) -> dict[str, torch.Tensor]:
    """Logits of the kit's tokens, by that name, in cells in fp32 that take a step twice; else nothing."""
    return gradients.answers(context, ("logits",)) if context.cell.dtype == "float32" else {}


def around(facet: Logprobs, context: Context) -> list[list[str]] | None:
    """Kind and name of what the call has changed of training. None under replay."""
    left: list[list[str]] | None = context.made.pop("around_logprobs", None)
    return left


def _changed(context: Context) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters of the last layer, and the head, on which all logits hang; none where it is tied.

    transformers computes with no checkpoint in FP8, nor with a published model.
    """
    layer, head, cell = last_layer(context), heads(context), context.cell
    return (layer, head) if layer and head and not cell.quantised_checkpoint and cell.size == TINY else ([], [])


def replayed(facet: Logprobs, context: Context) -> dict[str, bool] | None:
    """As `logprobs`, for `rolled` rows under given routes, one sample's in turns. None without routes.

    On one rank a call and a training step under other routes come first, so that kept ones show.
    """
    if context.cell.replay != "R3" or "replay" not in context.claims.facets:
        return None
    tokens_BS = load_file(context.input("tokens"))["tokens"]
    routes = in_turns(given(context, ROUTES), given(context, OTHER_ROUTES))
    order = rolled(torch.arange(len(tokens_BS)), context.cell, context.rank).tolist()
    rows_BS, of_rows = tokens_BS[order], [routes[row] for row in order]
    if context.cell.layout.world == 1:
        others = [given(context, OTHER_ROUTES)[row] for row in order]
        under(facet.logprobs, rows_BS, temperature(context.cell), routes=others)
        context.facet("replay").step(rows_BS, others)
    saved = checked(under(facet.logprobs, rows_BS, temperature(context.cell), routes=of_rows))
    if saved:
        context.save("replayed_logprobs", saved)
    return {"has": bool(saved)}


def checked(found: TokenLogprobs | None) -> dict[str, torch.Tensor]:
    """The tensors of an answer by name; none of None."""
    if found is None:
        return {}
    if not isinstance(found, TokenLogprobs):
        raise TypeError(f"expected api.TokenLogprobs or None, the target gave a {type(found).__name__}: {found!r:.80}")
    return {name.removesuffix("_BS"): of_BS for name, of_BS in vars(found).items() if of_BS is not None}


FACET = Facet(
    name="logprobs",
    protocol=Logprobs,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(
        Step(name="logprobs", ask=logprobs, stage=Stage.LOADED),
        Step(name="around_logprobs", ask=around, stage=Stage.LOADED),
        Step(name="replayed_logprobs", ask=replayed, stage=Stage.LOADED),
    ),
)
