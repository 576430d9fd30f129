"""What a run uses: worlds, the oracle of expected checkpoints, and judges.

The target is imported by worlds alone. The first of them says what it is and claims, and goes on to run cells.
"""

from __future__ import annotations

import queue
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.cells import Cell, Claims
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.facts import Described, Facts
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.records import Observation, write_events
from moeref_conformance.judges import Case
from moeref_conformance.plan import matrix as matrices
from moeref_conformance.plan.check_environment import require
from moeref_conformance.plan.plan import RunPlan, Settings, prepare
from moeref_conformance.resolve import DUMP, located, resolve
from moeref_conformance.run.disk import full_disk
from moeref_conformance.targets.dump import DumpTarget
from moeref_conformance.worlds.inputs import Copies

if TYPE_CHECKING:
    from moeref_conformance.worlds.coordinator import Coordinator
    from moeref_conformance.worlds.forked import ForkedWorld
    from moeref_conformance.worlds.torchrun import TorchrunWorld


class RunsCells(Protocol):
    """A world as a run uses it: opened once, then given one cell after another."""

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell, leaving records in `cell_dir`."""


MakeWorld = Callable[[RunPlan], AbstractContextManager[RunsCells]]
RankWorld: TypeAlias = "ForkedWorld | TorchrunWorld"


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Worlds by backend, the oracle, and judges by rule id. The kit's own tests replace them by simple ones.

    Static cells run in the worlds of the backend `static_in`.
    """

    worlds: Mapping[str, MakeWorld]
    expect: Callable[[Cell, Path], Any]  # oracles.checkpoint.expected
    judges: Mapping[str, Callable[[Case], Outcome]]
    static_in: str = "static"

    def world_of(self, cell: Cell) -> str:
        """The backend of the worlds in which the cell runs."""
        return self.static_in if cell.backend == "static" else cell.backend


class Worlds(ExitStack):
    """The open worlds of a run, by backend. Cells of several threads take turns."""

    def __init__(self, plan: RunPlan, parts: Machinery, folder: Path) -> None:
        super().__init__()
        self.plan = plan
        self._parts = parts
        self._folder = plan.settings.keep or folder / "cells"
        self._copies = self.enter_context(Copies(folder))
        self._free: dict[str, queue.LifoQueue[RunsCells]] = {}

    def open(self, cells: Iterable[Cell]) -> None:
        """Open as many worlds of each backend as run at the same time. This thread must live as long as they do.

        All import the target at once. One that cannot ends the run here, and does not fail in every cell.
        """
        from moeref_conformance.worlds.forked import ForkedWorld

        for backend, number in sorted(Counter(map(self._parts.world_of, cells)).items()):
            self._free[backend] = queue.LifoQueue()
            for _ in range(min(self.plan.workers, number)):
                self._free[backend].put(self.enter_context(self._parts.worlds[backend](self.plan)))
        for world in [world for free in self._free.values() for world in free.queue]:
            if isinstance(world, ForkedWorld):
                world.start()

    def observe(self, cell: Cell, inputs: Mapping[str, str]) -> Observation:
        """Run a cell on copies of `inputs` and read its records.

        Raises RuntimeError if the world itself failed, or a disk is full.
        """
        folder = self._cell_dir(cell)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = self._free[self._parts.world_of(cell)]
        world = free.get()
        try:
            outcome = self._copies.run(inputs, lambda own: world.run(cell, folder, own, self.plan.claims))
        finally:
            free.put(world)
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


@contextmanager
def served(settings: Settings, coordinator: Coordinator | None = None) -> Iterator[tuple[RunPlan, Machinery]]:
    """The plan of a run, by what the target says of itself in the world that imports it, and the machinery with it.

    A dump is no code: it is read here. With a `coordinator` the ranks are those of torchrun. Raises `BadInput`, and
    WorldError with the reason why the target cannot be imported.
    """
    require("transformers", "jinja2")
    if settings.target.startswith(DUMP):
        yield prepare(settings, lambda backend: resolve(settings.target)), machinery()
        return
    located(settings.target)  # a name that is none is refused without a world
    if any(cell.backend != "static" for cell in matrices.load(settings.matrix).select(settings.cells)):
        require("megatron.core")
    with ExitStack() as opened:
        first: list[RankWorld] = []

        def ask(backend: str) -> Described:
            world = _rank_world(settings, backend, coordinator)
            opened.enter_context(world)
            first.append(world)
            return Facts.of(world.start())

        plan = prepare(settings, ask)
        yield plan, machinery(coordinator, *first)


def machinery(coordinator: Coordinator | None = None, first: RankWorld | None = None) -> Machinery:
    """The real worlds, oracle and judges. With a `coordinator` the ranks are those of torchrun.

    `first` is a world that has been started, and becomes the first of its backend.
    """
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.oracles.checkpoint import expected

    started = [first] if first else []

    def make(backend: str) -> MakeWorld:
        return lambda plan: _world_with_ranks(plan, backend, coordinator, started)

    return Machinery(
        worlds={backend: make(backend) for backend in RANK_BACKENDS},
        expect=expected,
        judges=JUDGES,
        static_in=first.backend if first else "gloo",
    )


@contextmanager
def _world_with_ranks(
    plan: RunPlan, backend: str, coordinator: Coordinator | None, started: list[RankWorld]
) -> Iterator[RunsCells]:
    from moeref_conformance.worlds.dump import DumpWorld

    if isinstance(plan.recorded, DumpTarget):
        yield DumpWorld(plan.recorded)
        return
    ready = started.pop() if started and started[0].backend == backend else None
    with ready or _rank_world(plan.settings, backend, coordinator) as world:
        world.begin()
        yield world


def _rank_world(settings: Settings, backend: str, coordinator: Coordinator | None) -> RankWorld:
    from moeref_conformance.worlds.forked import ForkedWorld
    from moeref_conformance.worlds.torchrun import TorchrunWorld

    if coordinator:
        return TorchrunWorld(coordinator, backend, deadline=settings.deadline)
    return ForkedWorld(settings.target, deadline=settings.deadline, backend=backend)
