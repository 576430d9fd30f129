"""Facet `policy`: one training step with a policy's loss, and every parameter's gradient after it."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Policy
from moeref_conformance.contract.requests.logprobs import OTHER_TEMPERATURE
from moeref_conformance.contract.requests.policy import ENTROPY, advantages
from moeref_conformance.steps import gradients
from moeref_conformance.steps.facet import Context, Facet, Stage, Step


def asked(cell: Cell) -> bool:
    """Whether a cell asks: with a loss mask, and where a step has no other loss besides."""
    return cell.loss_mask and not cell.router_loss and not cell.mtp and gradients.asked(cell)


def step(facet: Policy, context: Context) -> None:
    """Save the gradients by `chunk:local`. Raises TypeError for anything but fp32 tensors by (chunk, local name)."""
    cell, held = context.cell, load_file(context.input("tokens"))
    of_all = (held["tokens"], held["mask"], advantages(held["tokens"]))
    tokens_BS, mask_BS, advantages_BS = (
        gradients.batch(gradients.of_replica(of_BS, cell, context.rank), cell) for of_BS in of_all
    )
    found = facet.policy_gradients(tokens_BS, mask_BS, advantages_BS, OTHER_TEMPERATURE, ENTROPY)
    context.save("policy", gradients.by_name(found))


def on_no_token(facet: Policy, context: Context) -> dict[str, Any]:
    """`gradients.of_no_token` of a policy's loss."""

    def ask(rows_BS: torch.Tensor, none_BS: torch.Tensor) -> Any:
        return facet.policy_gradients(rows_BS, none_BS, advantages(rows_BS), OTHER_TEMPERATURE, ENTROPY)

    return gradients.of_no_token(ask, context)


FACET = Facet(
    name="policy",
    protocol=Policy,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(
        Step(name="policy", ask=step, stage=Stage.LOADED),
        Step(name="policy_on_no_token", ask=on_no_token, stage=Stage.LOADED),
    ),
)
