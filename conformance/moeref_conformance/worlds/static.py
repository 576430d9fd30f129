"""The world without processes: a target's names tables for any number of ranks, asked for in this process.

It makes the same records as a world with ranks, so that the same judges read them, but keeps them in memory, and equal
tables once: thousands of ranks hold few tables. A table must be pure, hence the target is asked here, in the kit's own
process, and without a deadline.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, NameRow, Target, TensorMeta, World
from moeref_conformance.contract.exits import EXIT_RAISED, RankExit, RunOutcome
from moeref_conformance.steps import facet_of, seeds


class StaticWorld:
    """Drives the pure facets of one target, and what is pure of others. A context manager only as other worlds are."""

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
        events: dict[int, list[dict[str, Any]]] = {}
        workdir = cell_dir / "work"
        workdir.mkdir(parents=True, exist_ok=True)
        world = World(
            kind="static", rank=-1, size=size, device="cpu", workdir=workdir, hf_config=Path(inputs["hf_config"])
        )
        rank, step = 0, "open"
        try:
            with self._target.open(cell, world) as session:
                from moeref_conformance.steps.probe import (
                    checked_rows,  # imports torch, which listing cells does not need
                )

                step, table, tables = "names", facet_of(session, "names"), _Tables()
                for rank in range(size):
                    events[rank] = [_event(step, "ok", value=tables.kept(table.table(rank)))]
                    if "seeds" in claims.facets:
                        planned = seeds.planned(facet_of(session, "seeds"), rank)
                        events[rank].append(_event("seeds_planned", "ok", value=planned))
                    exits.append(_exit(rank, 0, step))
                if "config" in claims.facets:
                    from moeref_conformance.steps import config

                    step, rank = "config", 0
                    events[0].append(_event(step, "ok", value=config.recorded(facet_of(session, step), None)))
                if "dispatch" in claims.facets:
                    from moeref_conformance.steps import dispatch

                    step, rank, facet = "padding", 0, facet_of(session, "dispatch")
                    events[0].append(_event(step, "ok", value=dispatch.padded(facet, cell.layout)))
                    step = "dispatchers"
                    events[0].append(_event(step, "ok", value=dispatch.chosen(facet)))
                if "plan" in claims.facets:
                    step, rank = "plan", 0
                    tensors = tuple(checked_rows(facet_of(session, step).tensors(), TensorMeta))
                    events[0].append(_event(step, "ok", value=tensors))
                step = "close"
        except Exception as error:  # whatever the target raises is its verdict
            what = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            events.setdefault(rank, []).append(_event(step, "raised", error=what))
            exits = [done for done in exits if done.rank != rank] + [_exit(rank, EXIT_RAISED, step)]
        return RunOutcome(exits=tuple(exits), seconds=time.monotonic() - began, events=events)


class _Tables:
    """Tables in one form, each kept once: a rank whose table equals another's, row by row, shares it."""

    def __init__(self) -> None:
        self._tables: dict[tuple[NameRow, ...], tuple[NameRow, ...]] = {}
        self._given: dict[int, tuple[tuple[NameRow, ...], tuple[NameRow, ...]]] = {}

    def kept(self, given: Any) -> tuple[NameRow, ...]:
        """The table to keep for `given`. Raises TypeError that names what came instead of rows of api.NameRow."""
        # A tuple that came before and is still held cannot have changed; anything else is compared.
        if id(given) in self._given:
            return self._given[id(given)][1]
        from moeref_conformance.steps.probe import checked_rows

        rows = tuple(_hashable(row) for row in checked_rows(given, NameRow))
        kept = self._tables.setdefault(rows, rows)
        if type(given) is tuple:
            self._given[id(given)] = given, kept
        return kept


def _hashable(row: NameRow) -> NameRow:
    for name in ("local", "global_name", "dtype"):
        if not isinstance(getattr(row, name), str):
            raise TypeError(f"api.NameRow of {row.local!r}: {name} is {getattr(row, name)!r}, not a str")
    good = type(row.hf) is tuple and type(row.shape) is tuple
    return row if good else replace(row, hf=tuple(row.hf), shape=tuple(row.shape))


def _exit(rank: int, code: int, step: str) -> RankExit:
    ended = code == 0
    return RankExit(rank, code, None, False, step, "", "", first=not ended, finished=ended)


def _event(step: str, phase: str, **more: Any) -> dict[str, Any]:
    return {"step": step, "phase": phase, "at": time.time(), "seconds": 0.0, **more}
