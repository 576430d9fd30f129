"""Facet `optimizer`: an optimizer that is made before the weights are loaded takes steps from them."""

from __future__ import annotations

from collections import deque

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Optimizer
from moeref_conformance.contract.requests.optimizer import RELOADED, STILL, of_one_microbatch, rates
from moeref_conformance.steps.facet import Context, Facet, Stage, Step, refusal
from moeref_conformance.steps.gradients import batch, of_replica
from moeref_conformance.steps.tensors import copied, module_tensors


def stepped(optimizer: Optimizer, context: Context) -> dict[str, float | None]:
    """The norm of the gradient by step; saves all parameters after each, by `step.chunk:local`.

    Behind the first one weights are sent and logits computed, as RL does between steps. Behind the last one the
    checkpoint is loaded again, unless the target refuses to load twice; then the parameters hold what they did before.
    """
    cell, tokens_BS = context.cell, load_file(context.input("tokens"))["tokens"]
    own_BS = of_replica(tokens_BS, cell, context.rank)
    first_BS = tokens_BS[: cell.rows].repeat(len(own_BS) // cell.rows, 1)
    norms, saved = dict[str, float | None](), dict[str, torch.Tensor]()
    loaded = {name: copied(parameter) for name, parameter in _parameters(context).items()}
    for step, rate in rates(cell).items():
        norm = optimizer.step(batch(first_BS if step == of_one_microbatch(cell) else own_BS, cell), rate)
        norms[step] = None if norm is None else float(norm)
        saved |= {f"{step}.{name}": copied(parameter) for name, parameter in _parameters(context).items()}
        if step == STILL:
            deque(context.facet("export").stream(), maxlen=0)
            if "forward" in context.claims.facets:
                context.facet("forward").logits(tokens_BS)
    if refusal(context.facet("export").load, context.input("checkpoint")) is None:
        optimizer.step(batch(first_BS, cell), 0.0)
        saved |= {f"{RELOADED}.{name}": copied(parameter) for name, parameter in _parameters(context).items()}
    context.save("optimizer", saved)
    for name, parameter in _parameters(context).items():
        parameter.data.copy_(loaded[name])
    return norms


def _parameters(context: Context) -> dict[str, torch.Tensor]:
    """The parameters of this rank by `chunk:local`."""
    tensors = module_tensors(context.facet("export").chunks())
    return {f"{chunk}:{local}": tensor for chunk, local, kind, tensor in tensors if kind == "parameter"}


FACET = Facet(
    name="optimizer",
    protocol=Optimizer,
    needs=frozenset({"export"}),
    asked_in=lambda cell: cell.optimizer_step,
    steps=(
        Step(name="optimizer_made", ask=lambda optimizer, context: optimizer.make()),
        Step(name="optimizer", ask=stepped, stage=Stage.LOADED),
    ),
)
