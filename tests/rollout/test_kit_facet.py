"""The kit's facet `sync` with a real engine: moeref is green, and every fault turns its rules red and no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.selftest.faults import FAULTS, Fault
from moeref_conformance.selftest.faults.sync import QWEN
from moeref_conformance.selftest.faulty import by_tag
from moeref_conformance.worlds.forked import ForkedWorld

from docs.examples import vllm_reload
from tests.kit.bench import Bench

pytestmark = pytest.mark.sync
ENGINES = {name: fault for name, fault in FAULTS.items() if fault.cell.backend == ENGINE}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ForkedWorld("moeref_conformance.selftest.faulty:by_tag", backend=ENGINE) as world:
        world.start()
        yield Bench(world, tmp_path_factory.mktemp("engines"), by_tag)


@pytest.mark.parametrize("fault", ENGINES.values(), ids=ENGINES)
def test_a_fault_of_an_engine_turns_its_rules_red(bench: Bench, fault: Fault) -> None:
    outcomes = bench.judge(replace(fault.cell, tags=(f"fault:{fault.id}",)), one_rank=True, deadline=600)
    found = {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings}
    assert found.keys() == {*fault.rules, *fault.also}
    assert any(fault.says in finding.message for findings in found.values() for finding in findings)


@pytest.mark.parametrize(("name", "rules"), [("target", {"SYN-002"}), ("packed", {"SYN-009", "SYN-010"})])
def test_what_vllms_own_reload_lacks(name: str, rules: set[str], tmp_path: Path) -> None:
    with ForkedWorld(f"docs.examples.vllm_reload:{name}", backend=ENGINE) as world:
        world.start()
        outcomes = Bench(world, tmp_path, getattr(vllm_reload, name)()).judge(QWEN, one_rank=True, deadline=600)
    assert {rule for rule, outcome in outcomes.items() if outcome.findings} == rules
