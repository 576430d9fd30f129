"""The world without ranks: the pure answers of a target, for any number of ranks, from one process.

It makes the same records as a world with ranks, for the same judges, but keeps them in memory. A fork server forks the
process, as it does for ranks, and the records come back in one message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from moeref_conformance.contract.api import Cell, Claims, Target, World
from moeref_conformance.contract.exits import EXIT_RAISED, RankExit, RunOutcome
from moeref_conformance.contract.records import error_record, event, rank_dir
from moeref_conformance.worlds.plain import packed, unpacked

#: The file with the message, in the record of rank 0.
ANSWER = "answer"


def answer(target: Target, cell: Cell, cell_dir: Path, inputs: Mapping[str, str]) -> None:
    """Run a cell in this process, and leave the outcome to `answered`. Steps are on record as they begin."""
    from moeref_conformance.steps.run import Log

    folder = rank_dir(cell_dir, 0)
    log = Log(folder)
    world = StaticWorld(target, lambda step: log.write(step, "begin", time.time()))
    message = packed(world.run(cell, cell_dir, inputs, target.claims))
    (folder / ANSWER).write_bytes(message)


def answered(process: RunOutcome, cell_dir: Path) -> RunOutcome:
    """The outcome of a static cell whose process ended like this: what it left, or if it failed, that."""
    if not process.ok:
        return process
    file = rank_dir(cell_dir, 0) / ANSWER
    outcome: RunOutcome = unpacked(file.read_bytes())
    file.unlink()
    return replace(outcome, strays=process.strays, written=process.written)


class StaticWorld:
    """Takes the static steps of the target's facets in this process. `begins` is called with each new step."""

    def __init__(self, target: Target, begins: Callable[[str], None] = lambda step: None) -> None:
        self._target, self._begins = target, begins

    def run(self, cell: Cell, cell_dir: Path, inputs: Mapping[str, str], claims: Claims) -> RunOutcome:
        """Take the steps of every rank, then those taken once. An error ends the run as that rank's exit."""
        began, size, workdir = time.monotonic(), cell.layout.world, cell_dir / "work"
        workdir.mkdir(parents=True, exist_ok=True)
        world = World(
            backend="static", rank=-1, size=size, device="cpu", workdir=workdir, hf_config=Path(inputs["hf_config"])
        )
        events: dict[int, list[dict[str, Any]]] = {}
        rank, done, at = 0, 0, "open"  # whose step it is, how many ranks have taken all of theirs
        self._begins(at)
        try:
            with self._target.open(cell, world) as session:
                # Imports torch, which listing cells does not need.
                from moeref_conformance.steps.facet import Context, Static, static_steps

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
                every_rank = static_steps(claims, cell, Static.EVERY_RANK)
                asked = [(r, r, *each) for r in range(size) for each in every_rank]
                asked += [(0, size, *each) for each in static_steps(claims, cell, Static.ONCE)]
                for owner, before, facet, step in asked:
                    if step.name != at:
                        self._begins(step.name)
                    rank, done, at = owner, before, step.name
                    value = step.take(facet, replace(context, rank=rank))
                    events.setdefault(rank, []).append(event(at, "ok", value=value))
                rank, done, at = 0, size, "close"
            events.setdefault(0, []).append(event(at, "ok"))
            exits = [RankExit(r, last_step=at, finished=True) for r in range(size)]
        except Exception as error:  # whatever the target raises is its verdict
            events.setdefault(rank, []).append(event(at, "raised", error=error_record(error)))
            exits = [RankExit(r, last_step=at, finished=True) for r in range(done) if r != rank]
            exits.append(RankExit(rank, EXIT_RAISED, last_step=at, first=True))
        return RunOutcome(tuple(exits), time.monotonic() - began, events=events)


def _no_tensors(step: str, tensors: Mapping[str, Any]) -> NoReturn:
    raise TypeError(f"step {step}: the static world keeps no tensors")
