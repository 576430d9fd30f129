"""What step an optimizer has taken that is not where Adam goes: known mistakes in its settings and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract.api import Layout
from moeref_conformance.oracles import optimizer
from moeref_conformance.oracles.placement import hf_numbers
from moeref_conformance.oracles.shares import ROUTERS

#: Settings of recipes for other models and optimizers.
BETAS = ((0.9, 0.95), (0.9, 0.98), (0.9, 0.99), (0.95, 0.999), (0.95, 0.95), (0.0, 0.999))
EPSILONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
#: The ends of names of norms.
VECTORS = ("norm.weight", "layernorm.weight")
#: What frameworks clip norms to.
CLIPPED = 1.0
#: How near a norm is that is explained, relative to it, and how many times as far the right one is at least.
NORM_NEAR, FARTHER = 1e-5, 3
#: So many elements have to tell.
ENOUGH = 4


class Step(NamedTuple):
    """What a parameter that was `held` has `added` at a rate, and the right gradients of all steps up to this one.

    `norms` are those of all gradients of each step, `parts` those of some, by words for them. An element `tells` if
    Adam's formula says how it moves. `asked` are the settings that the optimizer was made with.
    """

    gradients: Sequence[torch.Tensor]
    norms: Sequence[float]
    held: torch.Tensor
    added: torch.Tensor
    tells: torch.Tensor
    rate: float
    asked: optimizer.Settings = optimizer.PLAIN
    parts: Mapping[str, Sequence[float]] = MappingProxyType({})

    def moved_by(self, **settings: Any) -> torch.Tensor:
        """What is added with these settings in the place of those that were asked for."""
        return optimizer.update(self.gradients, self.rate, self.asked._replace(**settings), self.norms, self.held)


def step_of(step: Step, limit: float) -> str:
    """What makes this step, with each element that tells within `limit` of the rate; empty if nothing does."""
    if int(step.tells.sum()) < ENOUGH:
        return ""
    return next((said for said, other in _others(step) if _near(step, other, limit)), "")


def _near(step: Step, other: torch.Tensor, limit: float) -> bool:
    return bool(((step.added - other).abs()[step.tells] <= limit * step.rate).all())


def _others(step: Step) -> Iterator[tuple[str, torch.Tensor]]:
    """Words for a mistake, and what would be added with it."""
    yield from _other_settings(step)
    gradients, number, right = step.gradients, len(step.gradients), step.moved_by()
    for counted in range(1, number + 2):
        if counted != number:
            said = f"the step counts as number {counted}, not {number}"
            betas = step.asked.betas
            yield said, right * (optimizer.corrected(counted, betas) / optimizer.corrected(number, betas))
    once = step._replace(gradients=gradients[-1:], norms=step.norms[-1:])
    yield "moments are lost: it moves as by a first step", once.moved_by()
    *_, before, last = [gradients[-1], *gradients]
    idle = step._replace(gradients=[*gradients[:-1], last.where(last != 0, before)])
    yield "where it has no gradient, that of the step before counts again", idle.moved_by()
    yield "where it has no gradient, it does not move", right.where(last != 0, 0.0)
    times = _times(step.added, right, step.tells)
    yield f"moved {times:.3g} times as far", times * right


def _other_settings(step: Step) -> Iterator[tuple[str, torch.Tensor]]:
    """Words for a setting that is not the one that was asked for, and what would be added with it."""
    asked, plain = step.asked, optimizer.PLAIN
    if asked != plain:
        yield "it moves as without any settings", step.moved_by(**plain._asdict())
    for betas in (*BETAS, plain.betas):
        yield f"betas are {betas}, not {asked.betas}", step.moved_by(betas=betas)
    for epsilon in (*EPSILONS, plain.epsilon):
        yield f"epsilon is {epsilon:g}, not {asked.epsilon:g}", step.moved_by(epsilon=epsilon)
    if asked.clip:
        yield "gradients are not clipped", step.moved_by(clip=0.0)
        scaled = [asked.clip / norm * of for norm, of in zip(step.norms, step.gradients, strict=True)]
        yield "short gradients are scaled up", step._replace(gradients=scaled).moved_by(clip=0.0)
    yield f"gradients are clipped to a norm of {CLIPPED:g}", step.moved_by(clip=CLIPPED)
    for words, norms in step.parts.items():
        yield f"gradients are clipped by the norm of {words} alone", step._replace(norms=norms).moved_by()
    without = step.moved_by(decay=0.0)
    decay = _times(without - step.added, step.held, step.tells) / step.rate
    said = f", not {asked.decay:g}" if asked.decay else ""
    yield f"a weight decay of {decay:.3g}{said}", without - decay * step.rate * step.held
    if asked.decay:
        yield "weights decay by their gradients, as by Adam's L2 penalty, not AdamW's", _with_penalty(step)


def _with_penalty(step: Step) -> torch.Tensor:
    """What is added where the decay is a part of each gradient, once that is clipped."""
    asked, pairs = step.asked, zip(step.norms, step.gradients, strict=True)
    gradients = [asked.scale(norm) * gradient + asked.decay * step.held for norm, gradient in pairs]
    return step._replace(gradients=gradients).moved_by(clip=0.0, decay=0.0)


def _times(got: torch.Tensor, want: torch.Tensor, tells: torch.Tensor) -> float:
    """How many times as large, by least squares."""
    return float((got * want)[tells].sum() / want[tells].square().sum().clamp_min(1e-30))


def norms_of(
    gradients: Mapping[str, Mapping[str, torch.Tensor]], got: Mapping[str, float | None], layout: Layout
) -> str:
    """Which gradients count otherwise in the norms that a rank has `got`, by step; empty if nothing explains all."""
    steps = [step for step in gradients if got.get(step) is not None]
    squares = [{name: float(of.double().square().sum()) for name, of in gradients[step].items()} for step in steps]
    have = [float(got[step] or 0.0) for step in steps]
    times = sorted({0, 2, layout.tp, layout.ep, layout.expert_tp} - {1})
    for words, names in _groups(list(squares[0]), layout) if squares else ():
        for counts in times:
            norms = [sum(of * (counts if name in names else 1) for name, of in one.items()) ** 0.5 for one in squares]
            right = [sum(one.values()) ** 0.5 for one in squares]
            told = any(abs(a - b) > FARTHER * NORM_NEAR * b for a, b in zip(norms, right, strict=True))
            if told and all(abs(a - b) <= NORM_NEAR * b for a, b in zip(norms, have, strict=True)):
                return f"as if {words} {f'counted {counts} times' if counts else 'were left out'}"
    return ""


def _groups(names: list[str], layout: Layout) -> Iterator[tuple[str, set[str]]]:
    """Gradients that may count otherwise than the rest, with words for them."""
    experts = {name: number for name in names if (number := hf_numbers(name)[1]) is not None}
    vectors = {name for name in names if name.endswith((*VECTORS, *ROUTERS))}
    yield "experts", set(experts)
    yield "norms and routers, which TP ranks hold alike,", vectors
    yield "all but experts", set(names) - set(experts)
    yield "norms", {name for name in vectors if name.endswith(VECTORS)}
    yield "routers", {name for name in vectors if not name.endswith(VECTORS)}
    yield "the embedding", {name for name in names if "embed_tokens" in name}
    yield "the head", {name for name in names if name == "lm_head.weight"}
    number = max(experts.values(), default=-1) + 1
    for parts in sorted({layout.ep, layout.tp} - {1}):
        for first in range(0, number, max(number // parts, 1)):
            last = first + number // parts - 1
            yield f"experts {first} to {last}", {name for name, of in experts.items() if first <= of <= last}
