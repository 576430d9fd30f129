"""Facet `gradients`: one training step, and every parameter's gradient after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Gradients
from moeref_conformance.contract.requests.gradients import FIRST
from moeref_conformance.contract.requests.logprobs import TEMPERATURE
from moeref_conformance.contract.requests.sequences import backwards
from moeref_conformance.steps.facet import Context, Facet, Stage, Step, answer
from moeref_conformance.steps.forward import heads, last_layer, scaled
from moeref_conformance.steps.recompute import recomputing


def trains(cell: Cell) -> bool:
    """Whether a cell takes a training step without an optimizer."""
    return cell.gradients and not cell.optimizer_step


def asked(cell: Cell) -> bool:
    """Whether it takes one under the routers' own choice: in fp32, where the order of sums changes no route."""
    return trains(cell) and cell.dtype == "float32"


def batch(tokens_BS: torch.Tensor, cell: Cell) -> torch.Tensor:
    """The rows of a step, or of its loss mask: the kit's, repeated for an interleaved schedule, with the same mean."""
    return tokens_BS[topology.step_order(len(tokens_BS), cell)]


def of_replica(tokens_BS: torch.Tensor, cell: Cell, rank: int) -> torch.Tensor:
    """The rows of a rank's data-parallel replica."""
    return tokens_BS[list(topology.replica_rows(cell, rank, len(tokens_BS)))]


def twice(cell: Cell) -> bool:
    """Whether a cell takes two steps, to see that the second one begins without what is left of the first.

    What may be left: gradients; copies of weights, where the first step has those of the last layer and the head
    `scaled`; and numbers of tokens and microbatches, of which the first step has fewer.

    On one rank, and on two with EP or ETP, where Megatron keeps gradients of experts in buffers of their own.
    """
    layout = cell.layout
    return layout.world == 1 or (layout.world == 2 and (layout.ep > 1 or layout.expert_tp != layout.tp))


def recomputes(cell: Cell) -> bool:
    """Whether a step recomputes forwards in its backward pass: where routers count tokens, and there are stages.

    Routers are recomputed with all that they are given, such as which tokens are padding.
    """
    return bool(cell.router_loss or cell.bias_update) and cell.layout.pp > 1


def answers(context: Context, names: Sequence[str] = ("logits", "logprobs")) -> dict[str, torch.Tensor]:
    """Logits of the kit's tokens, and where steps are a policy's their logprobs, by name; none unless `twice`."""
    cell, facets = context.cell, context.claims.facets
    if not twice(cell):
        return {}
    tokens_BS, found = load_file(context.input("tokens"))["tokens"], dict[str, torch.Tensor | None]()
    if "forward" in facets and "logits" in names:
        found["logits"] = context.facet("forward").logits(tokens_BS)
    of_policy = {"logprobs", "policy"} <= facets and cell.loss_mask and cell.replay == "off"
    if of_policy and "logprobs" in names:
        given = context.facet("logprobs").logprobs(tokens_BS, TEMPERATURE)
        found["logprobs"] = None if given is None else given.logprobs_BS
    here_BS = tokens_BS >= 0  # what stands after the end of a row counts for nothing
    where = {"logits": here_BS[..., None], "logprobs": here_BS[:, 1:]}
    return {name: held.detach().cpu().where(where[name], 0.0) for name, held in found.items() if held is not None}


def off(before: Mapping[str, torch.Tensor], context: Context) -> dict[str, float]:
    """How far `answers` are `apart` from those of before a step."""
    return apart(before, answers(context))


def apart(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """How far answers are off those before, relative to the largest of each; `inf` where there is none any more."""
    both = {name: (was, after.get(name, torch.full_like(was, torch.inf))) for name, was in before.items()}
    return {n: float((now - was).abs().max() / was.abs().max().clamp_min(1e-30)) for n, (was, now) in both.items()}


def step(facet: Gradients, context: Context) -> dict[str, Any]:
    """Save the gradients of the last step by `chunk:local`, and say how far the steps moved `answers`.

    A first step comes before it where `twice`, whose gradients are saved too, by FIRST; and where routers' biases are
    updated. The last one recomputes forwards where `recomputes`.

    Raises TypeError for anything but fp32 tensors by (chunk, local name).
    """
    cell, held = context.cell, load_file(context.input("tokens"))
    rows_BS, *mask = [
        batch(of_replica(held[name], cell, context.rank), cell) for name in ("tokens", "mask") if name in held
    ]
    first, before = dict[str, torch.Tensor](), answers(context)
    if cell.bias_update:
        other_BS = backwards(rows_BS)  # the same tokens, counted twice, would not move a bias otherwise
        facet.gradients(other_BS)
        without_gradients(other_BS, context)
    elif twice(cell):
        with scaled([*last_layer(context), *heads(context)]):
            found = facet.gradients(*(of_BS[: cell.rows] for of_BS in (rows_BS, *mask)))  # one microbatch
        first = {f"{FIRST}{name}": tensor.clone() for name, tensor in by_name(found).items()}
    with recomputing(cell)(context.facet("export").chunks()) if recomputes(cell) else nullcontext():
        found = facet.gradients(rows_BS, *mask)
    context.save("gradients", {**by_name(found), **first})
    return {"off": off(before, context)}


def without_gradients(tokens_BS: torch.Tensor, context: Context) -> None:
    """An evaluation of the rows, and their old log-probabilities, as RL asks for them between steps: neither counts."""
    cell, facets = context.cell, context.claims.facets
    if "forward" in facets:
        context.facet("forward").logits(tokens_BS)
    if "logprobs" in facets and cell.replay == "off" and not cell.precision:
        context.facet("logprobs").logprobs(tokens_BS, TEMPERATURE)


def by_name(gradients: Mapping[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by `chunk:local`. Raises TypeError for anything but fp32 tensors."""
    for (chunk, local), tensor in gradients.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            kind = getattr(tensor, "dtype", type(tensor))
            raise TypeError(f"gradients(): {local} of chunk {chunk} is {kind}, not fp32")
    return {f"{chunk}:{local}": tensor for (chunk, local), tensor in gradients.items()}


def on_no_token(facet: Gradients, context: Context) -> dict[str, Any] | None:
    """`of_no_token` of the plain loss. None in cells without a loss mask."""
    return of_no_token(facet.gradients, context) if context.cell.loss_mask else None


def of_no_token(ask: Callable[..., Mapping[tuple[int, str], torch.Tensor]], context: Context) -> dict[str, Any]:
    """A step with a mask that leaves no token in any row: the refusal, else the largest of each gradient but 0.

    `ask` gets the rows and the mask.
    """
    cell = context.cell
    rows_BS = batch(of_replica(load_file(context.input("tokens"))["tokens"], cell, context.rank), cell)
    found = answer(lambda: by_name(ask(rows_BS, torch.zeros_like(rows_BS, dtype=torch.bool))))
    if set(found) == {"refused"}:
        return dict(found)
    return {"largest": {name: float(tensor.abs().max()) for name, tensor in found.items() if tensor.any()}}


FACET = Facet(
    name="gradients",
    protocol=Gradients,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(
        Step(name="gradients", ask=step, stage=Stage.LOADED),
        Step(name="on_no_token", ask=on_no_token, stage=Stage.LOADED),
    ),
)
