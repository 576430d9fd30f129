"""The kit's facet `sync` with a real engine: moeref is green, and every fault turns its rules red and no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.contract.findings import Finding
from moeref_conformance.plan import known_failures, matrix
from moeref_conformance.selftest.faults import FAULTS, Fault
from moeref_conformance.selftest.faults.sync import QWEN
from moeref_conformance.selftest.faulty import by_tag
from moeref_conformance.worlds.forked import ForkedWorld

from docs.examples import skyrl_sync, vllm_reload
from tests.kit.bench import Bench

pytestmark = pytest.mark.sync
ROOT = Path(__file__).parents[2]
SKYRL = pytest.mark.skipif(not find_spec("skyrl"), reason="`nox -s sync -- --faults` puts SkyRL's source on the path")
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


def failing(module: ModuleType, name: str, folder: Path) -> dict[str, list[Finding]]:
    """What is found of the target of an example, by the rules that it fails."""
    with ForkedWorld(f"{module.__name__}:{name}", backend=ENGINE) as world:
        world.start()
        outcomes = Bench(world, folder, getattr(module, name)()).judge(QWEN, one_rank=True, deadline=600)
    return {rule: list(outcome.findings) for rule, outcome in outcomes.items() if outcome.findings}


@pytest.mark.parametrize(("name", "rules"), [("target", {"SYN-002"}), ("packed", {"SYN-009", "SYN-010"})])
def test_what_vllms_own_reload_lacks(name: str, rules: set[str], tmp_path: Path) -> None:
    assert failing(vllm_reload, name, tmp_path).keys() == rules


@SKYRL
def test_what_skyrls_sync_lacks_is_known_and_nothing_else(tmp_path: Path) -> None:
    entries = known_failures.load(ROOT / "matrices/known/skyrl.toml", matrix.load("rollout"))
    known = {rule: entry for entry in entries for rule in entry.rules}
    found = failing(skyrl_sync, "target", tmp_path)
    assert found.keys() == known.keys()
    assert [other for rule, findings in found.items() for other in known[rule].others(findings)] == []


@SKYRL
def test_skyrls_defect_shows_without_the_kit() -> None:
    script = [sys.executable, str(ROOT / "docs/examples/skyrl_broken_off.py")]
    run = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "shown: after a whole sync to version 1, ['a'] have their old values"
