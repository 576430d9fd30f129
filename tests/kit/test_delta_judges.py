"""The judges of deltas, on what the kit's own steps record of correct and of faulty designs: one process, no ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moeref_conformance.contract.api import Cell, Claims, World
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.requests.delta import versions
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.judges.delta import OVERHEAD, SPARSE
from moeref_conformance.selftest.faults.delta import FAULTS
from moeref_conformance.selftest.plain_delta import design
from moeref_conformance.worlds.static import StaticWorld

pytestmark = pytest.mark.cpu
CELL = FAULTS[0].cell
CLAIMS = Claims(facets=frozenset({"delta"}), families=frozenset({CELL.family}), backends=frozenset({"static"}))
RULES = sorted(rule for rule in JUDGES if rule.startswith("DLT-"))
#: A fault for each way in which a judge says something.
CHOSEN = (
    *("delta-base-by-reference", "delta-taken-in-place", "delta-of-any-base", "delta-of-differences"),
    *("delta-of-the-last-made", "delta-without-checksum", "delta-written-before-it-is-checked"),
    *("delta-version-before-success", "delta-of-what-is-in-common", "delta-larger-than-the-model"),
)


class Target:
    """Deltas of one design, and nothing else."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        self.wrap = wrap

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        yield self.wrap(SimpleNamespace(delta=None), cell, world)


def case(wrap: Callable[..., Any], folder: Path) -> Case:
    outcome = StaticWorld(Target(wrap)).run(CELL, folder, {"hf_config": ""}, CLAIMS)  # type: ignore[arg-type]
    assert outcome.ok
    return Case(CELL, None, Observation.read(CELL, folder, outcome), None, CLAIMS)


def judged(case: Case) -> dict[str, Outcome]:
    return {rule: JUDGES[rule](case) for rule in RULES}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case(design(), tmp_path_factory.mktemp("good"))


def test_a_correct_design_is_green(good: Case) -> None:
    exact = ("DLT-001", "DLT-003", "DLT-004")
    assert judged(good) == {rule: Outcome(met="exact" if rule in exact else "") for rule in RULES}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.id in CHOSEN], ids=lambda fault: fault.id)
def test_a_fault_turns_its_rules_red(fault: Any, tmp_path: Path) -> None:
    found = judged(case(fault.wrap, tmp_path))
    red = {rule for rule in RULES if found[rule].findings}
    # In a session a rule is judged only where those are green that it requires.
    assert {rule for rule in red if red.isdisjoint(load_rules()[rule].requires)} == {*fault.rules, *fault.also}
    assert any(fault.says in finding.message for finding in found[fault.rules[0]].findings)


@pytest.mark.parametrize("rule", RULES)
def test_missing_records_are_findings(rule: str) -> None:
    case = Case(CELL, None, Observation(CELL, []), None, CLAIMS)
    messages = [finding.message for finding in JUDGES[rule](case).findings]
    assert messages
    assert all("no record of step delta" in message for message in messages)


CUT = "its last byte cut off"


@pytest.mark.parametrize(
    ("rule", "step", "spoil", "says"),
    [
        (
            "DLT-001",
            "delta",
            lambda value: value["half changed"][0].update(spoiled=["a", "b"]),
            "half changed: making the delta changed a, b of the trainer's weights",
        ),
        (
            "DLT-001",
            "delta",
            lambda value: value["half changed"][1].update(refused="x" * 301),
            f"half changed: apply version 3, made of 2: refused: {'x' * 300}",
        ),
        (
            "DLT-001",
            "delta",
            lambda value: value["half changed"][1].update(held=value["1 % changed"][0]["held"]),
            r"half changed: apply version 3, made of 2: taken, and holds .* not those of version 3, those of version 0",
        ),
        (
            "DLT-005",
            "delta_damaged",
            lambda value: value["damaged"][CUT].update(refused=None),
            f"{CUT}: taken, and holds .* not those of version 1, those of version 0",
        ),
        (
            "DLT-006",
            "delta_damaged",
            lambda value: value["damaged"][CUT]["then"].update(refused="x" * 301),
            f"{CUT}, then whole: refused: {'x' * 300}",
        ),
        (
            "DLT-006",
            "delta_damaged",
            lambda value: value["damaged"][CUT]["then"].update(held={}),
            f"{CUT}, then whole: taken, and holds .* not those of version 1",
        ),
        (
            "DLT-007",
            "delta",
            lambda value: value["a receiver that is ahead"][3].update(refused="late", held={}),
            "a receiver that is ahead: apply version 11, made of 9: refused, and holds .* not those of version 10",
        ),
        (
            "DLT-007",
            "delta_damaged",
            lambda value: value["damaged"][CUT].update(held={}),
            f"{CUT}: refused, and holds .* not those of version 0",
        ),
        (
            "DLT-008",
            "delta_damaged",
            lambda value: value["drifted"].update(refused=None, held={}),
            "weights were changed after version 0: taken, and holds .* not those of version 1",
        ),
    ],
)
def test_what_a_finding_says(good: Case, rule: str, step: str, spoil: Callable[[Any], None], says: str) -> None:
    record = copy.deepcopy(good.observation)
    assert record is not None
    spoil(record.ranks[0].value(step))
    (found,) = JUDGES[rule](replace(good, observation=record, made={})).findings
    assert found.rank == 0
    assert re.fullmatch(says, found.message)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("1 % changed", SPARSE), ("half changed", 1.02), ("nothing changed", 1.02)],
)
def test_the_size_of_a_delta(good: Case, name: str, limit: float) -> None:
    model = sum(tensor.nbytes for tensor in versions(CELL)[0].values())
    most = OVERHEAD + int(model * limit)
    for size, findings in ((most, 0), (most + 1, 1)):
        record = copy.deepcopy(good.observation)
        assert record is not None
        record.ranks[0].value("delta")[name][0]["bytes"] = size
        found = JUDGES["DLT-010"](replace(good, observation=record, made={})).findings
        assert [(f.expected, f.got) for f in found] == [(f"at most {most}", str(size))] * findings
