"""The memory of a rank of each pipeline stage, and which settings lower it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeref.bridge import LocalShard
from moeref.costs.activations import Recompute, Shape, activations, in_flight
from moeref.costs.states import States, states
from moeref.costs.training import Training
from moeref.families import Model
from moeref.layout import Layout

GIB = 2**30
NO_RECOMPUTE = Recompute()
#: Recomputation that keeps least.
_FULL = Recompute(granularity="full", method="uniform", num_layers=1)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank of a pipeline rank. activations: None if they are not counted."""

    states: States
    activations: int | None = None
    routes: int = 0

    @property
    def peak(self) -> int:
        """The most that is allocated at once: the optimizer steps when activations and routes are gone."""
        return self.states.total + max((self.activations or 0) + self.routes, self.states.step)

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready bytes by name."""
        return {**vars(self.states), "activations": self.activations, "routes": self.routes, "peak": self.peak}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides the memory of a run. shards: of a rank of each pipeline rank. tokens: of one microbatch."""

    model: Model
    layout: Layout
    shards: Mapping[int, tuple[LocalShard, ...]]
    training: Training
    recompute: Recompute = NO_RECOMPUTE
    tokens: int | None = None
    replay: bool = False

    def memory(self) -> dict[int, Memory]:
        """The memory of a rank of each pipeline rank; without `tokens` there are no activations."""
        kept = self._activations() or {}
        return {
            pp: Memory(states(held, self.layout, self.training), kept.get(pp), self._routes(pp))
            for pp, held in self.shards.items()
        }

    def _activations(self) -> dict[int, int] | None:
        if self.tokens is None or not self.training.trains:
            return None
        shape = Shape(model=self.model, layout=self.layout, tokens=self.tokens)
        stages = self.layout.stages(self.model.num_layers, mtp=self.model.mtp_layers)
        return activations(shape, stages, self.recompute, self.training.microbatches(self.layout))

    def _routes(self, pp: int) -> int:
        """The int32 targets of the microbatches in flight, as `moeref.megatron.replay` copies them to the device."""
        if self.tokens is None or not self.replay:
            return 0
        shape = Shape(model=self.model, layout=self.layout, tokens=self.tokens)
        stages = self.layout.stages(self.model.num_layers, mtp=self.model.mtp_layers)
        own = (layer for vp in range(self.layout.vpp) for layer in stages.layers[pp, vp])
        routers = sum(self.model.moe_layers[layer] for layer in own)
        flying = in_flight(self.layout, pp, self.training.microbatches(self.layout)) if self.training.trains else 1
        return round(4 * routers * shape.R * self.model.top_k * flying)

    def fixes(self) -> Iterator[tuple[str, int]]:
        """(change, highest peak of a rank with it) for each change of settings that lowers it."""
        if not self.training.trains:
            return
        now = highest(self.memory())
        sharded = {"use_distributed_optimizer": True}
        changes: tuple[tuple[str, dict[str, Any]], ...] = (
            ("use_distributed_optimizer=true", sharded),
            ("grad_reduce_in_fp32=false", {"grad_reduce_in_fp32": False}),
            ("use_precision_aware_optimizer=true", {**sharded, "use_precision_aware_optimizer": True}),
        )
        others = [(said, replace(self, training=replace(self.training, **change))) for said, change in changes]
        for said, other in (*others, ("recompute_granularity=full", replace(self, recompute=_FULL))):
            if (then := highest(other.memory())) < now:
                yield said, then


def largest(found: Mapping[int, Memory]) -> int:
    """The pipeline rank with the highest peak."""
    return max(found, key=lambda pp: found[pp].peak)


def highest(found: Mapping[int, Memory]) -> int:
    """The highest peak of a rank."""
    return found[largest(found)].peak
