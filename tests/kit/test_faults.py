"""The kit is able to fail: every fault turns its rules red and no others, and the good target stays green there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from moeref_conformance.api import Cell, Layout
from moeref_conformance.judges import JUDGES, Case, Outcome
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.records import Observation
from moeref_conformance.rules import load_rules
from moeref_conformance.targets.faulty import FAULTS, Fault, by_tag
from moeref_conformance.worlds.gloo import GlooWorld

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
RULES = load_rules()


class Bench:
    """One world for all faults: runs a cell with its one-rank baseline under the same tags and judges it."""

    def __init__(self, world: GlooWorld, folder: Path) -> None:
        self._world, self._folder = world, folder
        self._seen: dict[tuple[str, tuple[str, ...]], Observation] = {}

    def observe(self, cell: Cell, deadline: float) -> Observation:
        key = cell.id, cell.tags
        if key not in self._seen:
            where = self._folder / f"cell{len(self._seen)}"
            where.mkdir()
            self._world.deadline = deadline
            outcome = self._world.run(cell, where, expected(cell, self._folder).inputs, by_tag.claims)
            assert not outcome.error, outcome.error
            self._seen[key] = Observation.read(cell, where, outcome.exits, outcome.seconds)
        return self._seen[key]

    def judge(self, cell: Cell, deadline: float = 60.0) -> dict[str, Outcome]:
        one = replace(cell, layout_name="one", layout=Layout())
        case = Case(
            cell=cell,
            expected=expected(cell, self._folder),
            observation=self.observe(cell, deadline),
            baseline=self.observe(one, deadline),
            target=by_tag,
        )
        outcomes: dict[str, Outcome] = {}
        for rule in RULES.values():
            if not rule.applies(cell.world):
                continue
            unmet = [r for r in rule.requires if outcomes[r].findings or outcomes[r].untested]
            outcomes[rule.id] = Outcome(untested=f"requires {unmet}") if unmet else JUDGES[rule.id](case)
        return outcomes


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with GlooWorld("moeref_conformance.targets.faulty:by_tag", grace=2.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_turns_its_rules_red(bench: Bench, fault: Fault) -> None:
    outcomes = bench.judge(replace(fault.cell, tags=(f"fault:{fault.id}",)), fault.deadline)
    red = {rule for rule, outcome in outcomes.items() if outcome.findings}
    if os.environ.get("SHOW_FAULTS"):
        print(f"\n{fault.id}: red {sorted(red)}")
        for rule in sorted(red):
            first = outcomes[rule].findings[0]
            print(f"   {rule} {first.message} | {first.diagnosis}")
    assert red == set(fault.rules) | set(fault.also)
    said = [f"{f.message} {f.diagnosis}" for rule in fault.rules for f in outcomes[rule].findings]
    assert any(fault.diagnosis in text for text in said), said


@pytest.mark.parametrize("cell", {f.cell.id: f.cell for f in FAULTS.values()}.values(), ids=lambda c: c.id)
def test_the_good_target_stays_green(bench: Bench, cell: Cell) -> None:
    outcomes = bench.judge(cell)
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}
    assert not [rule for rule, o in outcomes.items() if o.untested]


def test_every_rule_is_turned_red_by_a_fault() -> None:
    assert {rule for fault in FAULTS.values() for rule in fault.rules} == RULES.keys()


def test_rules_name_the_faults_that_turn_them_red() -> None:
    found = {rule: sorted(f.id for f in FAULTS.values() if rule in f.rules) for rule in RULES}
    assert {rule: sorted(r.faults) for rule, r in RULES.items()} == found
