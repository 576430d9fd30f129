"""Runs cells of one target in one world and applies every rule, without the runner: for tests of the rules."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, Layout, Target
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.records import Observation, RankRecord
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.faults.base import Variant
from moeref_conformance.selftest.faulty import ByTag
from moeref_conformance.worlds.forked import ForkedWorld
from moeref_conformance.worlds.inputs import given
from moeref_conformance.worlds.static import StaticWorld

from tests.kit.shared_world import narrowed

RULES = load_rules()
#: What routers choose themselves: in bf16 nothing is compared with it.
NATIVE = {"FWD-001", "FWD-002", "RPL-002", "RPL-003", "RPL-009"}


def spoiled(case: Case, rank: int, record: RankRecord) -> Case:
    """A case in which a rank left another record."""
    assert case.observation is not None
    ranks = [*case.observation.ranks[:rank], record, *case.observation.ranks[rank + 1 :]]
    return replace(case, observation=replace(case.observation, ranks=ranks), made={})


def without(case: Case, rank: int, step: str) -> Case:
    """A case in which a rank left no record of a step."""
    assert case.observation is not None
    whole = case.observation.ranks[rank]
    record = RankRecord(rank, whole.dir)
    record.events = [event for event in whole.events if event["step"] != step]
    return spoiled(case, rank, record)


def otherwise(case: Case, step: str, change: Callable[[Any], object]) -> Case:
    """A case in which the record of rank 0 has another value of a step."""
    assert case.observation is not None
    whole = case.observation.ranks[0]
    record = RankRecord(0, whole.dir)
    record.events = copy.deepcopy(whole.events)
    change(record.value(step))
    return spoiled(case, 0, record)


class Bench:
    """One world for many targets, told apart by a cell's tags.

    Runs a cell, and its one-rank baseline, once for all who ask, and judges it. What a cell with tags recorded is
    removed once it is judged, unless the bench `keeps` it: no other test asks for it, and hundreds fill a disk.
    """

    def __init__(
        self, world: ForkedWorld, folder: Path, target: Target, inputs: Path | None = None, *, keeps: bool = False
    ) -> None:
        """Records go to `folder`; expected models too, unless benches share the folder `inputs`."""
        self._world, self._folder, self._target = world, folder, target
        self._inputs, self._keeps = inputs or folder, keeps
        self._static = StaticWorld(target)
        self._seen: dict[tuple[str, tuple[str, ...]], Observation] = {}
        self._ran = 0

    def observe(self, cell: Cell, deadline: float) -> Observation:
        key = cell.id, cell.tags
        if key not in self._seen:
            where = self._folder / f"cell{self._ran}"
            where.mkdir()
            self._ran += 1
            self._world.deadline = deadline
            world = self._static if cell.backend == "static" else self._world
            with given(expected(cell, self._inputs).inputs) as own:
                outcome = world.run(cell, where, own.paths, self._claims(cell))
                outcome = replace(outcome, written=own.written())
            assert not outcome.error, outcome.error
            self._seen[key] = Observation.read(cell, where, outcome)
        return self._seen[key]

    def judge(self, cell: Cell, *, one_rank: bool = False, deadline: float = Variant.deadline) -> dict[str, Outcome]:
        """Outcomes of all rules that the target claims.

        The faults of the cell's tags are in the one-rank run only if they show there.
        """
        case = self.case(cell, one_rank=one_rank, deadline=deadline)
        outcomes: dict[str, Outcome] = {}
        for rule in RULES.values():
            if not rule.judged_in(cell) or rule.unclaimed(case.claims):
                continue
            unmet = [r for r in rule.requires if r in outcomes and (outcomes[r].findings or outcomes[r].untested)]
            outcomes[rule.id] = Outcome(untested=f"requires {unmet}") if unmet else JUDGES[rule.id](case)
        if cell.tags and not self._keeps:
            self._forget(cell.tags)
        return outcomes

    def _forget(self, tags: tuple[str, ...]) -> None:
        for key in [key for key in self._seen if key[1] == tags]:
            shutil.rmtree(self._seen.pop(key).ranks[0].dir.parent)

    def case(self, cell: Cell, *, one_rank: bool = False, deadline: float = Variant.deadline) -> Case:
        """What judges read of a cell."""
        observation = self.observe(cell, deadline)
        one = replace(cell, layout_name="one", layout=Layout(), tags=cell.tags if one_rank else ())
        return Case(
            cell=cell,
            expected=expected(cell, self._inputs),
            observation=observation,
            # Rules that look at it require RUN-001.
            baseline=None if observation.crashes or cell.backend == "static" else self.observe(one, deadline),
            claims=self._claims(cell),
        )

    def _claims(self, cell: Cell) -> Claims:
        claims = self._target.claims_in(cell) if isinstance(self._target, ByTag) else self._target.claims
        return narrowed(claims, cell.tags)
