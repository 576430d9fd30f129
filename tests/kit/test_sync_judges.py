"""Faults of an engine turn their rules red, and a good one none: with an engine that needs no inference engine.

tests/rollout/test_kit_facet.py has them with a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.judges import JUDGES
from moeref_conformance.selftest.faults import FAULTS, Fault
from moeref_conformance.selftest.faults.sync import GLM, QWEN
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import RULES, Bench, otherwise, without
from tests.kit.toy_engine import DESIGNS, target

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
ENGINES = {name: fault for name, fault in FAULTS.items() if fault.cell.backend == ENGINE}
#: Red besides with this engine, which lives on when an update fails amid samples. With vLLM these rules are green.
OF_THE_LIVING = {
    "running-prompts-kept-in-the-cache": ("SYN-009", "SYN-010"),
    "cache-kept-after-a-failure": ("SYN-009",),
}


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
    assert {rule for rule in outcomes if rule.startswith("SYN-")} == {f"SYN-{n:03}" for n in range(1, 14)}


@pytest.mark.parametrize("design", DESIGNS)
def test_another_design_is_green(bench: Bench, design: str) -> None:
    outcomes = bench.judge(replace(QWEN, tags=(f"design:{design}",)), one_rank=True)
    assert {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings} == {}
    assert not [rule for rule, outcome in outcomes.items() if outcome.untested]


def _first_state(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Change the first of the updates that failed."""
    return lambda value: change(next(state for state in value.values() if "version" in state))


def _first_mode(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Change what was seen in the first pause mode."""
    return lambda value: change(next(iter(value.values())))


#: By what a record of a good engine says instead: rule, step, the change of its value, and what is found.
OTHERWISE: dict[str, tuple[str, str, Callable[[dict[str, Any]], object], str]] = {
    "the second of two updates alone was taken": (
        "SYN-007",
        "sync_two",
        lambda value: value.update(refused=["no", None]),
        "after two updates at once",
    ),
    "neither of two updates was taken": (
        "SYN-007",
        "sync_two",
        lambda value: value.update(refused=["no", "no"]),
        "after two updates at once",
    ),
    "an update that lacked a tensor raised nothing": (
        "SYN-009",
        "sync_failed",
        _first_state(lambda state: state.update(refused=None)),
        "raised nothing",
    ),
    "the whole update after a failed one left the old weights": (
        "SYN-010",
        "sync_failed",
        lambda value: next(one["again"] for one in value.values() if "again" in one).update(version=0),
        "and a whole update the engine says version 0",
    ),
    "an engine has a version and serves nothing": (
        "SYN-009",
        "sync_failed",
        _first_state(lambda state: state.update(refused="no", sampled={"refused": "RuntimeError: gone"})),
        "the engine is half dead",
    ),
    "an engine that has no version serves": (
        "SYN-009",
        "sync_failed",
        _first_state(lambda state: state.update(refused="no", version={"refused": "RuntimeError: gone"})),
        "the engine is half dead",
    ),
    "tokens behind an update amid them are of the old version": (
        "SYN-006",
        "sync_under_way",
        _first_mode(lambda found: found["then"][0].update(versions=[0] * len(found["then"][0]["versions"]))),
        "after the update the engine does not serve version 1",
    ),
    "tokens amid an update without labels": (
        "SYN-006",
        "sync_under_way",
        _first_mode(lambda found: found["meanwhile"][0].update(versions=[])),
        "are labelled []",
    ),
    "tokens amid an update of a third version": (
        "SYN-006",
        "sync_under_way",
        _first_mode(
            lambda found: found["meanwhile"][0]["versions"].append(found["meanwhile"][0]["versions"].pop() + 2)
        ),
        "tokens are labelled",
    ),
    "tokens behind a failed update are labelled with its version": (
        "SYN-009",
        "sync_failed",
        _first_state(lambda state: state["sampled"][0].update(versions=[1] * len(state["sampled"][0]["versions"]))),
        "the engine says version 0, and labels tokens 1",
    ),
    "tokens of two updates at once are labelled with numbers that are no versions": (
        "SYN-007",
        "sync_two",
        lambda value: value["sampled"][0].update(versions=[float(one) for one in value["sampled"][0]["versions"]]),
        "and labels tokens 1.0",
    ),
    "an update amid which a sample was asked for failed": (
        "SYN-006",
        "sync_under_way",
        _first_mode(lambda found: found["amid"].update(refused="no")),
        "an update amid which a sample was asked for was refused: no",
    ),
    "a sample that was asked for amid an update never came": (
        "SYN-006",
        "sync_under_way",
        _first_mode(lambda found: found["amid"].update(sampled=None)),
        "never came",
    ),
    "nothing is sampled behind an update amid which a sample was asked for": (
        "SYN-006",
        "sync_under_way",
        _first_mode(lambda found: found["amid"].update(behind={"refused": "RuntimeError: gone"})),
        "there is none: RuntimeError: gone",
    ),
    "the prompt that was asked for amid an update is of the old version behind it": (
        "SYN-006",
        "sync_under_way",
        _first_mode(lambda found: found["amid"]["behind"][0].update(versions=[1] * 6)),
        "after an update amid which a sample was asked for",
    ),
    "samples behind an update amid them have no routes": (
        "SYN-011",
        "sync_under_way",
        _first_mode(lambda found: found["then"][0].update(routes=None)),
        "after the update no routes came",
    ),
    "the second prompt of a call is sampled as the first one was": (
        "SYN-012",
        "sync",
        lambda value: value["sampled"]["cached"][1].update(value["sampled"]["cached"][0]),
        "5 samples of one prompt are only 4 different ones",
    ),
    "an engine that was killed has a version": (
        "SYN-008",
        "sync_killed",
        lambda value: value.update(version=0),
        "after it was killed the engine is half dead: version 0",
    ),
    "a sample that a failed update met is labelled with its version": (
        "SYN-009",
        "sync_failed",
        lambda value: value["broken off amid samples in pause mode keep"]["meanwhile"][0]["versions"].__setitem__(
            -1, 1
        ),
        "a sample that it met is of other weights",
    ),
    "an update has written to a tensor": (
        "SYN-002",
        "sync",
        lambda value: value["written"].update(back=["model.norm.weight"]),
        "an update has written to 1 of the trainer's tensors",
    ),
    "an update to a lower version was taken, and is not served": (
        "SYN-005",
        "sync",
        lambda value: value["lower"].update(refused=None),
        "after an update to a lower version, which raised nothing, the third weights give them",
    ),
    "tokens behind an update to a lower version that was refused are labelled with it": (
        "SYN-005",
        "sync",
        lambda value: value["lower"]["sampled"][0].update(versions=[9] * 6),
        "which was refused, tokens of version 10 are labelled 10, 9",
    ),
    "an engine is dead behind an update to a lower version that it took": (
        "SYN-005",
        "sync",
        lambda value: value["lower"].update(refused=None, sampled={"refused": "RuntimeError: gone"}),
        "nothing is served: RuntimeError: gone",
    ),
    "a killed engine took long": ("SYN-008", "sync_killed", lambda value: value.update(seconds=121.0), "took 121 s"),
}


@pytest.mark.parametrize("said", OTHERWISE)
def test_a_record_that_says_otherwise_is_found(bench: Bench, said: str) -> None:
    rule, step, change, says = OTHERWISE[said]
    found = JUDGES[rule](otherwise(bench.case(QWEN, one_rank=True), step, change)).findings
    assert any(says in finding.message for finding in found), [finding.message for finding in found]


@pytest.mark.parametrize("rule", [f"SYN-{number:03}" for number in range(1, 14)])
def test_a_record_without_a_step_is_no_pass(bench: Bench, rule: str) -> None:
    for step in RULES[rule].steps:
        outcome = JUDGES[rule](without(bench.case(QWEN, one_rank=True), 0, step))
        assert outcome.findings or outcome.untested, f"passes without step {step}"


@pytest.mark.parametrize("fault", ENGINES.values(), ids=ENGINES)
def test_a_fault_turns_its_rules_red(bench: Bench, fault: Fault) -> None:
    # One draws each sample many times.
    outcomes = bench.judge(replace(fault.cell, tags=(f"fault:{fault.id}",)), one_rank=True, deadline=120)
    found = {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings}
    assert found.keys() == {*fault.rules, *fault.also, *OF_THE_LIVING.get(fault.id, ())}
    assert any(fault.says in finding.message for findings in found.values() for finding in findings)


def test_logprobs_are_of_the_logits_that_the_target_claims(bench: Bench) -> None:
    case = bench.case(QWEN, one_rank=True)
    processed = replace(case, claims=replace(case.claims, engine_logprobs="processed"), made={})
    assert "logits divided by the temperature" in JUDGES["SYN-013"](processed).findings[0].message
