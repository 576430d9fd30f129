"""The memory of one rank of a pipeline stage, and what to change where it is too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeref.bridge import LocalShard
from moeref.costs.states import States, states
from moeref.costs.training import Training
from moeref.layout import Layout

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank of a pipeline rank."""

    states: States

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return self.states.total + self.states.step

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready bytes by name."""
        return {**vars(self.states), "peak": self.peak}


def memory(shards: Mapping[int, tuple[LocalShard, ...]], layout: Layout, training: Training) -> dict[int, Memory]:
    """The memory of a rank of each pipeline rank, whose shards are given."""
    return {pp: Memory(states(held, layout, training)) for pp, held in shards.items()}


def largest(found: Mapping[int, Memory]) -> int:
    """The pipeline rank with the highest peak."""
    return max(found, key=lambda pp: found[pp].peak)


def fixes(shards: tuple[LocalShard, ...], layout: Layout, training: Training) -> Iterator[tuple[str, int]]:
    """(change of training, bytes of the peak with it) for each that lowers the peak of a rank with these shards."""
    now = Memory(states(shards, layout, training)).peak
    sharded = {"use_distributed_optimizer": True}
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("use_distributed_optimizer=true", sharded),
        ("grad_reduce_in_fp32=false", {"grad_reduce_in_fp32": False}),
        ("use_precision_aware_optimizer=true", {**sharded, "use_precision_aware_optimizer": True}),
    )
    for said, change in changes if training.trains else ():
        then = Memory(states(shards, layout, replace(training, **change))).peak
        if then < now:
            yield said, then
