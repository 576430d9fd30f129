"""The world without processes: the pure answers of a target, for any number of ranks.

It makes the same records as a world with ranks, for the same judges, but keeps them in memory. Pure answers need no
process of their own: the target is asked in the kit's process, without a deadline.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moeref_conformance.contract.api import Cell, Claims, Target, World
from moeref_conformance.contract.exits import EXIT_RAISED, RankExit, RunOutcome
from moeref_conformance.contract.records import event

if TYPE_CHECKING:
    from moeref_conformance.steps.facet import Context, Facet, Step


class StaticWorld:
    """Takes the static steps of the target's facets. A context manager like other worlds, with nothing to close."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __enter__(self) -> StaticWorld:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def run(self, cell: Cell, cell_dir: Path, inputs: Mapping[str, str], claims: Claims) -> RunOutcome:
        """Take the steps of every rank, then those taken once. An error ends the run as that rank's exit."""
        began, record = time.monotonic(), _Record()
        workdir = cell_dir / "work"
        workdir.mkdir(parents=True, exist_ok=True)
        hf_config = Path(inputs["hf_config"])
        world = World(
            backend="static", rank=-1, size=cell.layout.world, device="cpu", workdir=workdir, hf_config=hf_config
        )
        try:
            with self._target.open(cell, world) as session:
                from moeref_conformance.steps.facet import Context  # imports torch, which listing cells does not need

                context = Context(
                    rank=0,
                    cell=cell,
                    world=world,
                    claims=claims,
                    session=session,
                    inputs=inputs,
                    save=_no_tensors,
                    folder=workdir,
                )
                record.ask(context)
        except Exception as error:  # whatever the target raises is its verdict
            record.fail(error)
        return RunOutcome(exits=tuple(record.exits), seconds=time.monotonic() - began, events=record.events)


class _Record:
    """Events and exits of one cell, and the rank and step to which an error belongs."""

    def __init__(self) -> None:
        self.exits: list[RankExit] = []
        self.events: dict[int, list[dict[str, Any]]] = {}
        self._rank, self._step = 0, "open"

    def ask(self, context: Context) -> None:
        """Take all static steps."""
        from moeref_conformance.steps.facet import Static, static_steps

        every_rank = static_steps(context.claims, context.cell, Static.EVERY_RANK)
        for rank in range(context.cell.layout.world):
            self._rank, at_rank = rank, replace(context, rank=rank)
            for facet, step in every_rank:
                self._take(facet, step, at_rank)
            self.exits.append(RankExit(rank, last_step=self._step, finished=True))
        self._rank = 0
        for facet, step in static_steps(context.claims, context.cell, Static.ONCE):
            self._take(facet, step, context)
        self._step = "close"

    def fail(self, error: Exception) -> None:
        """Make `error` the exit of the rank whose step was taken last."""
        what = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        self.events.setdefault(self._rank, []).append(event(self._step, "raised", error=what))
        others = [done for done in self.exits if done.rank != self._rank]
        self.exits = [*others, RankExit(self._rank, EXIT_RAISED, last_step=self._step, first=True)]

    def _take(self, facet: Facet, step: Step, context: Context) -> None:
        self._step = step.name
        value = step.take(facet, context)
        self.events.setdefault(self._rank, []).append(event(step.name, "ok", value=value))


def _no_tensors(step: str, tensors: Mapping[str, Any]) -> NoReturn:
    raise TypeError(f"step {step}: the static world keeps no tensors")
