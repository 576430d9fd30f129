"""Runs cells: worlds that are opened once and shared, and a folder for the records of each cell."""

from __future__ import annotations

import queue
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.records import Observation, write_events
from moeref_conformance.plan.plan import Plan
from moeref_conformance.run.machinery import MakeWorld, RunsCells


class Worlds(AbstractContextManager["Worlds"]):
    """The open worlds of a run, by backend. Cells of several threads take turns."""

    def __init__(self, plan: Plan, make: Mapping[str, MakeWorld], folder: Path) -> None:
        self.plan = plan
        self._make = make
        self._folder = plan.settings.keep or folder / "cells"
        self._stack = ExitStack()
        self._free: dict[str, queue.LifoQueue[RunsCells]] = {}

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, cells: Iterable[Cell]) -> None:
        """Open as many worlds of each backend as run at the same time. This thread must live as long as they do."""
        for backend, number in sorted(Counter(cell.backend for cell in cells).items()):
            self._free[backend] = queue.LifoQueue()
            for _ in range(min(self.plan.workers, number)):
                self._free[backend].put(self._stack.enter_context(self._make[backend](self.plan)))

    def observe(self, cell: Cell, inputs: Mapping[str, str]) -> Observation:
        """Run a cell and read its records. Raises RuntimeError if the world itself failed."""
        folder = self._cell_dir(cell)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with self._borrow(cell.backend) as world:
            outcome = world.run(cell, folder, dict(inputs), self.plan.target.claims)
        if outcome.error:
            raise RuntimeError(f"world {cell.backend}: {outcome.error}")
        if outcome.events and self.plan.settings.keep:
            write_events(folder, outcome.events)
        return Observation.read(cell, folder, outcome.exits, outcome.seconds, outcome.events)

    def forget(self, cell: Cell) -> None:
        """Delete the records of a cell, unless the user keeps them."""
        if not self.plan.settings.keep:
            shutil.rmtree(self._cell_dir(cell), ignore_errors=True)

    @contextmanager
    def _borrow(self, backend: str) -> Iterator[RunsCells]:
        world = self._free[backend].get()
        try:
            yield world
        finally:
            self._free[backend].put(world)

    def _cell_dir(self, cell: Cell) -> Path:
        return self._folder / cell.id.replace("/", "__")
