"""Bugs of an offload: what does not come back, what comes back as something else, and what is read while it is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.gradients import Wrap
from moeref_conformance.selftest.faults.optimizer import counting, rebuilt_behind_calls, without_moments

#: Writes to a tensor of the model, by its local name, once it is back.
Change = Callable[[str, torch.Tensor], None]


def _tensors(session: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in session.export.chunks():
        yield from ((name, of.data) for named in (chunk.named_parameters, chunk.named_buffers) for name, of in named())


def _back_as(change: Change) -> Wrap:
    """A fault's `wrap`: once all is back, every tensor of the model passes through `change`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer

        def onload(weights_only: bool) -> None:
            good.onload(weights_only)
            for name, of in () if weights_only else _tensors(session):
                change(name, of)

        return facet(session, "optimizer", onload=onload)

    return wrap


def _later_half_of_experts(name: str, tensor: torch.Tensor) -> None:
    if ".experts." in name and dist.get_rank() == dist.get_world_size() - 1:
        tensor[len(tensor) // 2 :] = 0.0


def _no_bias(name: str, tensor: torch.Tensor) -> None:
    if name.endswith("expert_bias"):
        tensor.zero_()


def _rounded(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.copy_(tensor.bfloat16())


def _steps_in_a_copy(session: Session, cell: Cell, world: World) -> Any:
    """Parameters are in new memory, and the optimizer moves that in which they were."""
    good: Any = session.optimizer
    onloaded = list[bool]()

    def make(*settings: Any) -> None:
        onloaded.clear()
        good.make(*settings)

    def onload(weights_only: bool) -> None:
        good.onload(weights_only)
        onloaded.append(weights_only)

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        before = {name: of.clone() for name, of in _tensors(session)} if onloaded else {}
        norm = good.step(tokens_BS, rate)
        for name, of in _tensors(session):
            of.copy_(before.get(name, of))
        return norm

    return facet(session, "optimizer", make=make, onload=onload, step=step)


def _a_step_for_its_state(session: Session, cell: Cell, world: World) -> Any:
    """An optimizer that has no state yet when it is onloaded is given one by a step at the rate 0."""
    good: Any = session.optimizer
    rows: list[torch.Tensor] = []
    steps: list[float] = []

    def make(*settings: Any) -> None:
        steps.clear()
        good.make(*settings)

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        rows[:] = [tokens_BS]
        steps.append(rate)
        return good.step(tokens_BS, rate)

    def onload(weights_only: bool) -> None:
        good.onload(weights_only)
        if not steps:
            good.step(rows[0], 0.0)

    return facet(session, "optimizer", make=make, step=step, onload=onload)


@contextmanager
def _old_gradients_are_back(cell: Cell, world: World) -> Iterator[None]:
    """The first step after an onload adds to the gradients of the one before."""
    good, seen = torch.optim.Adam.step, dict[int, int]()
    last = dict[torch.Tensor, torch.Tensor]()

    def step(self: Any, closure: Any = None) -> Any:
        gradients = {of: of.grad for group in self.param_groups for of in group["params"] if of.grad is not None}
        if seen.setdefault(id(self), self.calls) != self.calls:
            for parameter, gradient in gradients.items():
                gradient.add_(last[parameter])
        seen[id(self)] = self.calls
        last.update({parameter: gradient.clone() for parameter, gradient in gradients.items()})
        return good(self, closure)

    with mock.patch.multiple(torch.optim.Adam, create=True, step=step, calls=0):
        yield


def _with_weights_alone(name: str, method: str) -> Wrap:
    """A fault's `wrap`: a facet's method reads experts that have not come back while weights alone are there."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer
        ask = getattr(getattr(session, name), method)
        alone = [False]

        def onload(weights_only: bool) -> None:
            good.onload(weights_only)
            alone[0] = weights_only

        def asked(*given: Any) -> Any:
            if not alone[0]:
                return ask(*given)
            experts = [of for key, of in _tensors(session) if ".experts." in key]
            held = [of.clone() for of in experts]
            for of in experts:
                of.zero_()
            answer = [*ask(*given)] if method == "stream" else ask(*given)
            for of, was in zip(experts, held, strict=True):
                of.copy_(was)
            return answer

        return facet(facet(session, "optimizer", onload=onload), name, **{method: asked})

    return wrap


FAULTS = (
    Fault(
        id="half-of-the-experts-stay-offloaded",
        bug="torch_memory_saver#71: what comes back from the CPU is not what has gone there",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_back_as(_later_half_of_experts),
        says="once all is back from an offload",
    ),
    Fault(
        id="experts-bias-lost-in-an-offload",
        bug="miles#1572 in kind: parameters are brought back, and buffers are not among them",
        rules=("OPT-011",),
        cell=cell("glm4_moe", "one", optimizer_step=True),
        wrap=_back_as(_no_bias),
        diagnosis="all are 0",
    ),
    Fault(
        id="offloaded-in-bf16",
        bug="a copy on the CPU has the dtype of the forward, and rounds what is in fp32",
        rules=("OPT-011",),
        cell=cell("glm4_moe", "one", optimizer_step=True),
        wrap=_back_as(_rounded),
        diagnosis="rounded to bfloat16",
    ),
    Fault(
        id="moments-lost-in-an-offload",
        bug="ISEEKYAN/Megatron-LM#45: what Adam holds is not what it was once it is back",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=counting("optimizer", "onload"),
        patch=without_moments,
        says="elements are elsewhere than without an offload",
        diagnosis="moments are lost",
    ),
    Fault(
        id="masters-rebuilt-in-an-offload",
        bug="master weights make room and are made anew of weights in bf16, without what small steps had added",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=counting("optimizer", "onload"),
        patch=rebuilt_behind_calls,
        diagnosis="master weights are rebuilt from the weights",
    ),
    Fault(
        id="optimizer-steps-where-parameters-were",
        bug="ISEEKYAN/Megatron-LM#168 in kind: parameters get new memory, and the optimizer has the old",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_steps_in_a_copy,
        diagnosis="not moved at all",
    ),
    Fault(
        id="onload-makes-a-state",
        bug="verl#299: an optimizer that is offloaded before its first step has a state that it has not made",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_a_step_for_its_state,
        says="elements are elsewhere than without an offload",
    ),
    Fault(
        id="old-gradients-are-back",
        bug="Megatron-LM#3112: gradient buffers come back with whatever their memory has",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=counting("optimizer", "onload"),
        patch=_old_gradients_are_back,
        says="elements are elsewhere than without an offload",
    ),
    Fault(
        id="experts-sent-while-they-are-away",
        bug="TRL#5142 in kind: weights are written and read where memory has been given away",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_with_weights_alone("export", "stream"),
        says="with weights alone back from an offload it is sent otherwise than before",
    ),
    Fault(
        id="logits-while-experts-are-away",
        bug="TRL#5142 in kind: log-probabilities are computed where memory has been given away",
        rules=("OPT-011",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_with_weights_alone("forward", "logits"),
        says="with weights alone back from an offload logits are",
    ),
)
