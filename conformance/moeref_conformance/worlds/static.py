"""The world without processes: a target's names tables for any number of ranks, asked for in this process.

It leaves the same records as a world with ranks, so that the same judges read them. A table must be pure, hence the
target is asked here, in the kit's own process, and without a deadline.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeref_conformance.api import Cell, Claims, NameRow, Names, Target, World
from moeref_conformance.records import EVENTS, rank_dir
from moeref_conformance.worlds import EXIT_RAISED, RankExit, RunOutcome


class StaticWorld:
    """Drives the facet `names` of one target. A context manager only for the likeness with the other worlds."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __enter__(self) -> StaticWorld:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def run(self, cell: Cell, cell_dir: Path, inputs: Mapping[str, str], claims: Claims) -> RunOutcome:
        """Ask for the table of every rank. The first error ends the cell as that rank's exit; nothing is raised."""
        began, size = time.monotonic(), cell.layout.world
        exits: list[RankExit] = []
        workdir = cell_dir / "work"
        workdir.mkdir(parents=True, exist_ok=True)
        world = World(
            kind="static", rank=-1, size=size, device="cpu", workdir=workdir, hf_config=Path(inputs["hf_config"])
        )
        rank, step = 0, "open"
        try:
            with self._target.open(cell, world) as session:
                from moeref_conformance.probe import plain_rows  # imports torch, which listing cells does not need

                step, table = "names", _names_of(session)
                for rank in range(size):
                    _write(cell_dir, rank, step, "ok", value=plain_rows(table.table(rank), NameRow))
                    exits.append(_exit(rank, 0, step))
                step = "close"
        except Exception as error:  # whatever the target raises is its verdict
            what = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            _write(cell_dir, rank, step, "raised", error=what)
            exits = [done for done in exits if done.rank != rank] + [_exit(rank, EXIT_RAISED, step)]
        return RunOutcome(exits=tuple(exits), seconds=time.monotonic() - began)


def _names_of(session: Any) -> Names:
    if session.names is None:
        raise TypeError("the target claims the facet 'names' but its session has None for it")
    names: Names = session.names
    return names


def _exit(rank: int, code: int, step: str) -> RankExit:
    ended = code == 0
    return RankExit(rank, code, None, False, step, "", "", first=not ended, finished=ended)


def _write(cell_dir: Path, rank: int, step: str, phase: str, **more: Any) -> None:
    folder = rank_dir(cell_dir, rank)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "phase": phase, "at": time.time(), "seconds": 0.0, **more}) + "\n")
