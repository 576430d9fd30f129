"""What a run uses besides the target: worlds, the oracle of expected checkpoints, and judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moeref_conformance.contract.cells import Cell, Claims
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.judges import Case
from moeref_conformance.plan.plan import Plan

if TYPE_CHECKING:
    from moeref_conformance.worlds.coordinator import Coordinator


class RunsCells(Protocol):
    """A world as a run uses it: opened once, then given one cell after another."""

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell, leaving records in `cell_dir`."""
        ...


MakeWorld = Callable[[Plan], AbstractContextManager[RunsCells]]


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Worlds by backend, the oracle, and judges by rule id. The kit's own tests replace them by simple ones."""

    worlds: Mapping[str, MakeWorld]
    expect: Callable[[Cell, Path], Any]  # oracles.checkpoint.expected
    judges: Mapping[str, Callable[[Case], Outcome]]


def machinery(coordinator: Coordinator | None = None) -> Machinery:
    """The real worlds, oracle and judges. With a `coordinator` the ranks are those of torchrun."""
    from moeref_conformance.contract.backends import RANK_BACKENDS
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.oracles.checkpoint import expected
    from moeref_conformance.worlds.static import StaticWorld

    with_ranks = {backend: partial(_world_with_ranks, backend, coordinator) for backend in RANK_BACKENDS}
    return Machinery(
        worlds={"static": lambda plan: StaticWorld(plan.target), **with_ranks}, expect=expected, judges=JUDGES
    )


@contextmanager
def _world_with_ranks(backend: str, coordinator: Coordinator | None, plan: Plan) -> Iterator[RunsCells]:
    from moeref_conformance.targets.dump import DumpTarget
    from moeref_conformance.worlds.dump import DumpWorld
    from moeref_conformance.worlds.forked import ForkedWorld
    from moeref_conformance.worlds.torchrun import TorchrunWorld

    if isinstance(plan.target, DumpTarget):
        yield DumpWorld(plan.target)
        return
    settings = plan.settings
    made = (
        TorchrunWorld(coordinator, backend, deadline=settings.deadline)
        if coordinator
        else ForkedWorld(settings.target, deadline=settings.deadline, backend=backend)
    )
    with made as world:
        world.start()  # a target that cannot be imported ends the run here, and does not fail in every cell
        yield world
