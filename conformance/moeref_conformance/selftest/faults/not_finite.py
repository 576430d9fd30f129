"""Bugs of steps whose gradients are not finite: who looks at them, what is skipped, and what goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell

#: What is done on a rank about a step that the good target skips: it gets the session and the rows of the step.
Instead = Callable[[Any, torch.Tensor], Any]


def instead(change: Instead, *, second: bool = True) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: skipped steps go through `change`. Without `second` only the first one does."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer
        seen = list[int]()

        def step(tokens_BS: torch.Tensor, rate: float) -> float | None:
            norm: float | None = good.step(tokens_BS, rate)
            if norm is not None and math.isfinite(norm):
                return norm
            seen.append(1)
            if second or len(seen) == 1:
                change(session, tokens_BS)
            return norm

        return facet(session, "optimizer", step=step)

    return wrap


def _parameters(session: Any) -> list[torch.Tensor]:
    return [of.data for chunk in session.export.chunks() for of in chunk.parameters()]


def _all_nan(session: Any, tokens_BS: torch.Tensor) -> None:
    """The norm is not finite, and clipping scales all gradients by it."""
    for of in _parameters(session):
        of.fill_(math.nan)


def _one_nan(session: Any, tokens_BS: torch.Tensor) -> None:
    """An infinity over the root of its square: Adam writes a NaN where the gradient has it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for of in _parameters(session)[-1:]:
            of.view(-1)[0] = math.nan


def _the_others_step(session: Any, tokens_BS: torch.Tensor) -> None:
    if dist.get_rank() < dist.get_world_size() - 1:
        for of in _parameters(session):
            of.sub_(OPTIMIZER_RATE)


def _by_momentum(session: Any, tokens_BS: torch.Tensor) -> None:
    """Gradients are set to 0, and Adam moves weights all the same, by moments of the steps before."""
    for of in _parameters(session):
        of.sub_(OPTIMIZER_RATE / 2)


def _one_raises(session: Any, tokens_BS: torch.Tensor) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("found NaN in local grad norm")


def _without_a_norm(session: Any, tokens_BS: torch.Tensor) -> None:
    raise UnboundLocalError("cannot access local variable 'grad_norm' where it is not associated with a value")


def _moments_go_on(session: Session, cell: Cell, world: World) -> Any:
    """A step that is to be skipped is one at the rate 0 of what is left of its gradient."""
    good: Any = session.optimizer
    due = list[torch.Tensor]()

    def step(tokens_BS: torch.Tensor, rate: float) -> float | None:
        while due:
            good.step(due.pop(), 0.0)
        norm: float | None = good.step(tokens_BS, rate)
        if norm is not None and not math.isfinite(norm):
            due.append(tokens_BS)
        return norm

    def make(*settings: Any) -> None:
        due.clear()
        good.make(*settings)

    return facet(session, "optimizer", make=make, step=step)


FAULTS = (
    Fault(
        id="steps-with-gradients-that-are-not-finite",
        bug="miles#2078, habitat-lab#2226: no one looks at the norm, and clipping writes its NaN into every weight",
        rules=("OPT-007",),
        cell=cell("qwen3_moe", "tp1", world_size=2, optimizer_step=True),
        wrap=instead(_all_nan),
        says="is not as it was before a step whose gradients are not finite",
        diagnosis="elements are not finite",
    ),
    Fault(
        id="infinities-pass-a-check-for-nan",
        bug="pytorch#46849: a norm is held against NaN, an infinity passes, and clipping by it writes a NaN",
        rules=("OPT-007",),
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=instead(_one_nan, second=False),
        says="inf: 0:",
        diagnosis="1 elements are not finite",
    ),
    Fault(
        id="one-rank-skips-a-step-alone",
        bug="WeatherGenerator#2724 in kind: each rank looks at gradients of its own experts alone, and others step",
        rules=("OPT-007",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=instead(_the_others_step),
        diagnosis="ranks [1] skip the step",
    ),
    Fault(
        id="one-stage-refuses-a-step-alone",
        bug="megatron-core's check_for_nan_in_grad raises on the rank whose gradient it is, before ranks reduce theirs",
        rules=("OPT-007",),
        cell=cell("glm4_moe", "pp2-first1", optimizer_step=True),
        wrap=instead(_one_raises),
        says="of 2 ranks only [1] refuse the step",
        diagnosis="ranks part",
    ),
    Fault(
        id="skipped-step-without-a-norm",
        bug="slime#1762: the branch that skips a step returns a norm that only the other one computes",
        rules=("OPT-007",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=instead(_without_a_norm),
        says="does not say that a gradient is not finite",
    ),
    Fault(
        id="skipped-step-by-momentum",
        bug="reported nowhere: gradients that are not finite are set to 0, and Adam's moments move the weights",
        rules=("OPT-007",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=instead(_by_momentum),
        diagnosis="moved",
    ),
    Fault(
        id="skipped-step-moves-moments",
        bug="dion#79 in kind: weights skip a step, and moments and step counts take it without what is not finite",
        rules=("OPT-007",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_moments_go_on,
        says="elements are elsewhere than without a skipped step",
    ),
)
