"""What a run uses besides the target: worlds, the oracle of expected checkpoints, and judges."""

from __future__ import annotations

import queue
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.cells import Cell, Claims
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.records import Observation, write_events
from moeref_conformance.judges import Case
from moeref_conformance.plan.plan import Plan
from moeref_conformance.run.disk import full_disk
from moeref_conformance.targets.dump import DumpTarget
from moeref_conformance.worlds.inputs import Copies

if TYPE_CHECKING:
    from moeref_conformance.worlds.coordinator import Coordinator


class RunsCells(Protocol):
    """A world as a run uses it: opened once, then given one cell after another."""

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell, leaving records in `cell_dir`."""


MakeWorld = Callable[[Plan], AbstractContextManager[RunsCells]]


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Worlds by backend, the oracle, and judges by rule id. The kit's own tests replace them by simple ones."""

    worlds: Mapping[str, MakeWorld]
    expect: Callable[[Cell, Path], Any]  # oracles.checkpoint.expected
    judges: Mapping[str, Callable[[Case], Outcome]]


class Worlds(ExitStack):
    """The open worlds of a run, by backend. Cells of several threads take turns."""

    def __init__(self, plan: Plan, make: Mapping[str, MakeWorld], folder: Path) -> None:
        super().__init__()
        self.plan = plan
        self._make = make
        self._folder = plan.settings.keep or folder / "cells"
        self._copies = self.enter_context(Copies(folder))
        self._free: dict[str, queue.LifoQueue[RunsCells]] = {}

    def open(self, cells: Iterable[Cell]) -> None:
        """Open as many worlds of each backend as run at the same time. This thread must live as long as they do."""
        for backend, number in sorted(Counter(cell.backend for cell in cells).items()):
            self._free[backend] = queue.LifoQueue()
            for _ in range(min(self.plan.workers, number)):
                self._free[backend].put(self.enter_context(self._make[backend](self.plan)))

    def observe(self, cell: Cell, inputs: Mapping[str, str]) -> Observation:
        """Run a cell on copies of `inputs` and read its records.

        Raises RuntimeError if the world itself failed, or a disk is full.
        """
        folder = self._cell_dir(cell)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        world = self._free[cell.backend].get()
        try:
            outcome = self._copies.run(inputs, lambda own: world.run(cell, folder, own, self.plan.target.claims))
        finally:
            self._free[cell.backend].put(world)
        if outcome.error:
            raise RuntimeError(f"world {cell.backend}: {outcome.error}")
        if outcome.events and self.plan.settings.keep:
            write_events(folder, outcome.events)
        observation = Observation.read(cell, folder, outcome)
        if full := full_disk(observation.crashes, folder):
            raise RuntimeError(full)
        return observation

    def forget(self, cell: Cell) -> None:
        """Delete the records of a cell, unless the user keeps them."""
        if not self.plan.settings.keep:
            shutil.rmtree(self._cell_dir(cell), ignore_errors=True)

    def _cell_dir(self, cell: Cell) -> Path:
        return self._folder / cell.id.replace("/", "__")


def machinery(coordinator: Coordinator | None = None) -> Machinery:
    """The real worlds, oracle and judges. With a `coordinator` the ranks are those of torchrun."""
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.oracles.checkpoint import expected
    from moeref_conformance.worlds.static import StaticWorld

    with_ranks = {backend: partial(_world_with_ranks, backend, coordinator) for backend in RANK_BACKENDS}
    return Machinery(
        worlds={"static": lambda plan: nullcontext(StaticWorld(plan.target)), **with_ranks},
        expect=expected,
        judges=JUDGES,
    )


@contextmanager
def _world_with_ranks(backend: str, coordinator: Coordinator | None, plan: Plan) -> Iterator[RunsCells]:
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
