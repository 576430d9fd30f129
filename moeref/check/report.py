"""The result of a preflight as values, from which the page and the JSON are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moeref.check.value import Value
from moeref.config import EffectiveSettings
from moeref.config.effective import plain
from moeref.costs import Crossing, EngineSide, Memory, Training, Waste
from moeref.dispatcher.padding import Plan
from moeref.families import Model
from moeref.record import Record
from moeref.seeds import Report as SeedReport


class CheckError(ValueError):
    """Input that cannot be checked: an unknown model, key or value. A layout that cannot work is a Problem instead."""


class UnmappedError(CheckError):
    """A model that moeref does not map: whether the run will work is not known."""


Verdict = Literal["works", "refused", "unknown"]
#: The exit code of each verdict; 2 is bad input.
EXIT: dict[Verdict, int] = {"works": 0, "refused": 1, "unknown": 3}


@dataclass(frozen=True)
class Problem:
    """Why the run will not work, and the fix; or, if not `refused`, what of it moeref cannot map or verify.

    `about`: layout, bridge, config, dispatcher, memory, batch, engine, padding or seeds; megatron for what
    megatron-core itself says; script, "not read" or a framework's name for what a reader of `--from` says.
    """

    about: str
    text: str
    fix: str = ""
    refused: bool = True


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its decoder layers by global number, and which other parts it holds."""

    pp: int
    vp: int
    layers: tuple[int, ...]
    holds: tuple[str, ...]  # "embedding", "mtp", "head"


@dataclass(frozen=True)
class Padding:
    """The padding plan, and the padded sequence length (None if no length is given)."""

    plan: Plan
    length: int | None
    padded: int | None
    rows: int | None  # on one rank, after context and sequence parallelism
    one_length: str = ""  # why every packed sequence is as long; "" if it is not


@dataclass(frozen=True)
class Report:
    """Everything known of a run before it starts. What a problem prevents from being computed is None or empty."""

    title: str
    model: Model
    layout: str
    world: int | None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    settings: EffectiveSettings | None = None
    record: Record | None = None  # None if there are problems
    verified: str = ""  # by what the settings were verified
    dispatcher: str = ""
    dispatcher_why: str = ""
    needs: tuple[str, ...] = ()  # what the machine must have
    stages: tuple[Stage, ...] = ()
    experts: tuple[int, int] | None = None  # number in the model, number on a rank
    padding: Padding | None = None
    seed: int = 0
    seed_formula: str = "megatron"
    seeds: SeedReport | None = None
    weights: Mapping[int, int] = field(default_factory=dict)  # pipeline rank -> bytes on each of its ranks
    training: Training = field(default_factory=Training)
    hbm: float | None = None  # GiB of a GPU
    memory: Mapping[int, Memory] = field(default_factory=dict)  # by pipeline rank, of each of its ranks
    nodes: Mapping[str, Crossing] = field(default_factory=dict)  # by kind of group
    dispatch_bytes: int | None = None  # that a rank sends in one dispatch of one layer
    waste: Waste | None = None
    engine: EngineSide | None = None
    exported: int = 0  # bytes of all Hugging Face tensors
    parameters: int = 0
    tensors: int = 0
    replay: str = "off"
    route_bytes: int = 0  # per token, as moeref.replay writes them
    read: Mapping[str, Value] = field(default_factory=dict)  # what a framework's configuration says, by name here
    elsewhere: tuple[Value, ...] = ()  # what of it concerns other parts of the framework

    @property
    def verdict(self) -> Verdict:
        """`refused` if Megatron or a rule refuses something, `unknown` if the rest could not be mapped or verified."""
        if any(problem.refused for problem in self.problems):
            return "refused"
        return "unknown" if self.problems else "works"

    @property
    def works(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_plain(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        padding = self.padding
        return {
            "works": self.works,
            "verdict": self.verdict,
            "verified": self.verified,
            "model": self.title,
            "family": self.model.family,
            "layout": self.layout,
            "world": self.world,
            "problems": [vars(problem) for problem in self.problems],
            "notes": list(self.notes),
            "megatron": self.settings.to_plain() if self.settings else None,
            "dispatcher": {
                "choice": self.dispatcher,
                "why": self.dispatcher_why,
                "needs": list(self.needs),
            },
            "stages": [{**vars(s), "layers": list(s.layers), "holds": list(s.holds)} for s in self.stages],
            "experts": None if self.experts is None else {"model": self.experts[0], "rank": self.experts[1]},
            "padding": None
            if padding is None
            else {
                "multiple": padding.plan.multiple,
                "factors": [vars(factor) for factor in padding.plan.factors],
                "length": padding.length,
                "padded": padding.padded,
                "one_length": padding.one_length,
                "rows_per_rank": padding.rows,
            },
            "seeds": None
            if self.seeds is None
            else {
                "seed": self.seed,
                "formula": self.seed_formula,
                "kinds": {
                    kind: dict(zip(("distinct", "wanted", "lowest", "highest"), (*counts, *ranges), strict=True))
                    for (kind, counts), ranges in zip(
                        self.seeds.counts.items(), self.seeds.ranges.values(), strict=True
                    )
                },
                "collisions": [vars(collision) for collision in (*self.seeds.collisions, *self.seeds.refused)],
            },
            "weight_bytes": {f"pp{pp}": size for pp, size in self.weights.items()},
            "training": vars(self.training),
            "hbm_gib": self.hbm,
            "memory_bytes": {f"pp{pp}": found.to_plain() for pp, found in self.memory.items()},
            "nodes": {kind: vars(found) for kind, found in self.nodes.items()},
            "dispatch_bytes": self.dispatch_bytes,
            "waste": None if self.waste is None else {**vars(self.waste), "share": self.waste.share},
            "engine": None if self.engine is None else self.engine.to_plain(),
            "parameters": self.parameters,
            "tensors": self.tensors,
            "replay": {"mode": self.replay, "bytes_per_token": self.route_bytes},
            "read": {name: _value(value) for name, value in self.read.items()},
            "elsewhere": [_value(value) for value in self.elsewhere],
        }


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "value": plain(value.value), "source": value.source}
