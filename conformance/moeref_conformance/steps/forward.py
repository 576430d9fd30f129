"""Facet `forward`: the logits of the kit's tokens, and before and after it those of their first ones alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Forward
from moeref_conformance.contract.requests.forward import FACTOR, KEPT
from moeref_conformance.contract.requests.sequences import backwards, shorter
from moeref_conformance.steps.bystanders import amid_training, partly_frozen
from moeref_conformance.steps.facet import Context, Facet, Stage, Step
from moeref_conformance.steps.hidden_states import entering_norms
from moeref_conformance.steps.tensors import module_tensors

_OF_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.(.+)")


def logits(forward: Forward, context: Context) -> dict[str, int]:
    """Whether this rank has logits, and how many tokens the shorter sequence has; the logits of both are saved, and the
    hidden states that enter the norms in the longer one.

    The first forwards come amid training. What they have changed of that is for the step `around`. The very first is
    of other tokens, so that kept ones show.

    A target that keeps something of one forward, such as the cosines of its positions, may be wrong in a longer one or
    in a shorter one. In the last two weights are `scaled` and `moved`, where stages are one: others that were kept
    show. Under replay the facet `replay` has a shorter one. In the first one parameters are `partly_frozen`.
    """
    tokens_BS = load_file(context.input("tokens"))["tokens"]
    length = shorter(tokens_BS.shape[1], context.cell) if context.cell.replay == "off" else 0
    first_BS = tokens_BS[:, :length].contiguous()

    chunks, entering = context.facet("export").chunks(), dict[str, torch.Tensor]()

    def whole() -> torch.Tensor | None:
        with entering_norms(chunks, entering, "entering"):
            return forward.logits(tokens_BS)

    left: list[list[str]] = []
    if length:
        with partly_frozen(chunks):  # not in the one that is compared bit for bit: fused kernels may round otherwise
            _, left = amid_training(chunks, lambda: forward.logits(backwards(first_BS)))
    logits_BSV, more = amid_training(chunks, whole)
    found = {"logits": logits_BSV, **entering}
    last = last_layer(context) if length else []
    if length:
        with scaled(last):
            found["shorter"] = forward.logits(first_BS)
    # A quantised tensor has parts, and a target may stay with the memory that it built.
    movable = context.claims.memory == "now" and all(type(of.data) is torch.Tensor for of in last)
    if last and movable:
        with moved(last):
            found["moved"] = forward.logits(first_BS)
    saved = {name: logits_BSV for name, logits_BSV in found.items() if logits_BSV is not None}
    if saved:
        context.save("forward", saved)
    context.made["around_forward"] = [*left, *(row for row in more if row not in left)]
    return {"has": "logits" in saved, "shorter": length, "changed": len(last), "moved": len(last) * movable}


def around(forward: Forward, context: Context) -> list[list[str]]:
    """Kind and name of what the first forwards have changed of training."""
    left: list[list[str]] = context.made.pop("around_forward")
    return left


def last_layer(context: Context) -> list[torch.Tensor]:
    """The parameters of the decoder's last layer on this rank, but for what is `KEPT`; none under PP."""
    if context.cell.layout.pp > 1:
        return []
    tensors = module_tensors(context.facet("export").chunks())
    named = [(m, of) for _, name, kind, of in tensors if kind == "parameter" and (m := _OF_LAYER.search(name))]
    last = max((int(m[1]) for m, _ in named), default=0)
    return [of for m, of in named if int(m[1]) == last and not KEPT.search(m[2])]


def heads(context: Context) -> list[torch.Tensor]:
    """The head on this rank, on which all logits hang; none where it is tied."""
    tensors = module_tensors(context.facet("export").chunks())
    return [] if context.cell.tied else [of for _, name, _, of in tensors if name.endswith("output_layer.weight")]


@contextmanager
def scaled(parameters: Sequence[torch.Tensor], factor: float = FACTOR) -> Iterator[None]:
    """Multiply these weights by a power of two, as if trained since."""
    for parameter in parameters:
        parameter.data.mul_(factor)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.data.div_(factor)


@contextmanager
def moved(parameters: Sequence[torch.Tensor], factor: float = FACTOR) -> Iterator[None]:
    """Give these weights new memory, multiplied by a power of two: as an optimizer with buffers of its own, or one who
    offloads, sets `.data`."""
    before = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data * factor
    try:
        yield
    finally:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data


FACET = Facet(
    name="forward",
    protocol=Forward,
    needs=frozenset({"export"}),
    steps=(
        Step(name="forward", ask=logits, stage=Stage.LOADED),
        Step(name="around_forward", ask=around, stage=Stage.LOADED),
    ),
)
