"""Facet `policy`: one training step with a policy's loss, and every parameter's gradient after it."""

from __future__ import annotations

from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Policy
from moeref_conformance.contract.requests.logprobs import TEMPERATURE
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
    found = facet.policy_gradients(tokens_BS, mask_BS, advantages_BS, TEMPERATURE, ENTROPY)
    context.save("policy", gradients.by_name(found))


FACET = Facet(
    name="policy",
    protocol=Policy,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(Step(name="policy", ask=step, stage=Stage.LOADED),),
)
