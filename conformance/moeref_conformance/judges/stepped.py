"""Parameters after steps of an optimizer, and where Adam's formula has them, by transformers' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.optimizer import MOVED, STILL, rates
from moeref_conformance.judges import Case, optimizer_causes
from moeref_conformance.judges.common import finding, less_one
from moeref_conformance.judges.step_gradients import norms_of_parts, right_norms, step_gradients
from moeref_conformance.oracles import optimizer
from moeref_conformance.oracles.placement import ExpectedShard
from moeref_conformance.oracles.shares import is_trained

#: Of the largest gradient of a tensor. Smaller ones may have another sign: they are right within 1e-4 of it (GRD-001).
TELLING = 1e-3
#: The least gradient of which Adam's epsilon hides no more than LIMIT.
LEAST = 1e-5
#: Of the rate: how far an element may be from where Adam moves it.
LIMIT = 2e-3
#: Below fp32: the share of elements, and a number, that may be elsewhere, since rounding turns gradients.
ELSEWHERE, FEW = 0.1, 4
#: Of a router, and of all experts of a layer: tokens that go to other experts turn more of them.
TURNED = 0.25


class Stepped(NamedTuple):
    """A parameter: `chunk:local`, what the oracle has there, and its values after each step, empty if not on record.

    `reloaded` are those after the checkpoint was loaded again; None of a target that does not.
    """

    key: str
    held: ExpectedShard
    after: dict[str, torch.Tensor]
    reloaded: torch.Tensor | None

    @property
    def on_record(self) -> bool:
        """Whether the values after each step are there, as many as the oracle has."""
        rows = self.held.rows
        return all(len(after[:rows]) == len(self.held.tensor[:rows]) for after in self.after.values())

    @property
    def last_digit(self) -> torch.Tensor:
        """The last digit of each element, where it has been largest."""
        values = torch.stack([values[: self.held.rows].double().abs() for values in self.after.values()])
        return torch.finfo(self.after[STILL].dtype).eps * torch.exp2(values.amax(0).clamp_min(1e-30).log2().floor())


def from_loaded(case: Case, record: RankRecord, key: str, held: ExpectedShard, moved: torch.Tensor) -> Stepped:
    """A parameter that has `moved` from what was loaded."""
    still = record.tensor("optimizer", f"{STILL}.{key}")
    less = still is not None and less_one(case, key, held, still)
    return Stepped(key, held, {STILL: held.tensor - 1 if less else held.tensor, MOVED: moved}, None)


def finding_of(case: Case, record: RankRecord, key: str, held: ExpectedShard, message: str, **more: object) -> Finding:
    """A finding about a parameter, by `chunk:local`."""
    names = {"local_name": key.partition(":")[2], "hf_name": held.hf[0] if held.hf else ""}
    return finding(case, record.rank, "optimizer", message, **{**names, "layer": held.layer, **more})


def experts_of_layers(
    stepped: Iterable[Stepped], count: Callable[[Stepped], tuple[int, int]]
) -> Iterator[tuple[int, int, Stepped]]:
    """Both counts over all experts of a layer that are on record, and the expert that has the most of the first."""
    layers: dict[int | None, list[tuple[int, int, Stepped]]] = {}
    for of in stepped:
        if of.held.expert is not None and of.on_record:
            layers.setdefault(of.held.layer, []).append((*count(of), of))
    for found in layers.values():
        yield sum(one[0] for one in found), sum(one[1] for one in found), max(found, key=lambda one: one[0])[2]


def how_far(added: torch.Tensor) -> str:
    """The furthest that an element has moved, in words."""
    return f"moved by up to {float(added.abs().max()) / OPTIMIZER_RATE:.3g} times the rate"


class Way(NamedTuple):
    """What each step that moves weights adds to a parameter by Adam's formula, and where the gradients are sure."""

    adds: list[torch.Tensor]
    tells: torch.Tensor
    none: torch.Tensor  # where there is no gradient
    gradients: list[torch.Tensor]
    norms: list[float]  # of the whole model's


def way_of(
    case: Case, rank: int, of: Stepped, steps: Sequence[str] = (), settings: optimizer.Settings = optimizer.PLAIN
) -> Way:
    """The way of a parameter, but for its decay, by the gradients of `steps`, in order; without them of each, once."""
    chunk, _, local = of.key.partition(":")
    sources = of.held.hf or ("model.embed_tokens.weight",)  # a tied head's replica names none
    gradients, floor, taken = list[torch.Tensor](), LEAST, steps or [*rates(case.cell)]
    for placed in (step_gradients(case)[step] for step in taken):
        held = placed.shard(rank, int(chunk), local, list(of.held.tensor.shape))
        gradients.append(held.tensor[: of.held.rows].double())
        floor = max(floor, TELLING * max(placed.largest(name) for name in sources))
    norms = [right_norms(case)[step] for step in taken]
    adds = [
        optimizer.update(gradients[:number], OPTIMIZER_RATE, settings, norms[:number])
        for number in range(min(2, len(gradients)), len(gradients) + 1)
    ]
    size = torch.stack(gradients).square().mean(0).sqrt()
    return Way(adds, size > floor, size == 0, gradients, norms)


def by_formula(
    case: Case,
    record: RankRecord,
    of: Stepped,
    steps: Sequence[str] = (),
    settings: optimizer.Settings = optimizer.PLAIN,
) -> tuple[list[Finding], float]:
    """The finding of a parameter, if there is one, and its distance from what is right, relative to the rate.

    That of the last of `steps`, by their gradients. A parameter of one dimension may decay or not, and one that no
    gradient reaches does not: torch's optimizers leave it out.
    """
    way = way_of(case, record.rank, of, steps, settings)
    held = of.after[STILL].double()[: of.held.rows]
    added = of.after[MOVED].double()[: of.held.rows] - held
    decays = (settings.decay, 0.0) if held.dim() == 1 else (settings.decay,)
    decays = decays if all(map(is_trained, of.held.hf)) else (0.0,)
    tried = [(decay, added + decay * OPTIMIZER_RATE * held) for decay in decays]
    decay, moved = min(tried, key=lambda one: int(wrong_of(one[1], way).sum()))
    wrong, right = wrong_of(moved, way), way.adds[-1]
    if not bool(wrong.any()):
        return [], float((moved - right).abs()[way.tells].max()) / OPTIMIZER_RATE if bool(way.tells.any()) else 0.0
    message = f"{of.key}: {int(wrong.sum())} of {wrong.numel()} elements are not where Adam moves them"
    said = _said(moved, right, way.tells)
    if not said:
        parts = {of: norms[-len(way.norms) :] for of, norms in norms_of_parts(case).items()} if settings.clip else {}
        told, asked = way.tells | way.none, settings._replace(decay=decay)
        step = optimizer_causes.Step(way.gradients, way.norms, held, added, told, OPTIMIZER_RATE, asked, parts)
        said = optimizer_causes.step_of(step, LIMIT)
    return [finding_of(case, record, of.key, of.held, message, diagnosis=said or how_far(added))], 0.0


def wrong_of(added: torch.Tensor, way: Way) -> torch.Tensor:
    """The elements that Adam does not move so, and of those of which no more is sure any that moves much further."""
    off = (added - way.adds[-1]).abs() / OPTIMIZER_RATE
    far = added.abs() > OPTIMIZER_RATE * (1 + LIMIT)
    return torch.where(way.tells | way.none, off > LIMIT, far) | added.isnan()


def _said(added: torch.Tensor, right: torch.Tensor, tells: torch.Tensor) -> str:
    if not bool(added.any()):
        return "not moved at all"
    upwards = bool(tells.any()) and torch.allclose(added[tells], -right[tells], rtol=0.1)
    return "moved up the gradient" if upwards else ""
