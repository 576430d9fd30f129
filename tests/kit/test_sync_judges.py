"""Faults of an engine turn their rules red, and a good one none: with an engine that needs no inference engine.

tests/rollout/test_kit_facet.py has them with a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.selftest.faults import FAULTS, Fault
from moeref_conformance.selftest.faults.sync import GLM, QWEN
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.toy_engine import target

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
ENGINES = {name: fault for name, fault in FAULTS.items() if fault.cell.backend == ENGINE}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ForkedWorld("tests.kit.toy_engine:target", backend=ENGINE, grace=1.0) as world:
        world.start()
        yield Bench(world, tmp_path_factory.mktemp("engines"), target)


@pytest.mark.parametrize("cell", [QWEN, GLM], ids=lambda cell: cell.family)
def test_a_good_engine_is_green(bench: Bench, cell: object) -> None:
    outcomes = bench.judge(cell, one_rank=True)  # type: ignore[arg-type]
    assert {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings} == {}
    assert not [rule for rule, outcome in outcomes.items() if outcome.untested]
    assert {rule for rule in outcomes if rule.startswith("SYN-")} == {f"SYN-{n:03}" for n in range(1, 12)}


@pytest.mark.parametrize("fault", ENGINES.values(), ids=ENGINES)
def test_a_fault_turns_its_rules_red(bench: Bench, fault: Fault) -> None:
    outcomes = bench.judge(replace(fault.cell, tags=(f"fault:{fault.id}",)), one_rank=True)
    found = {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings}
    assert found.keys() == {*fault.rules, *fault.also}
    assert any(fault.says in finding.message for findings in found.values() for finding in findings)
