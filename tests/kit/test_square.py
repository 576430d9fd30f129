"""A missing transpose in a square matrix: shapes fit, so values have to tell.

Experts of the published gpt-oss are square: 2880 by 2880.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.oracles import recipes
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.faults import FAULTS
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.faulty import by_tag
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("square")
    square = {**recipes._FAMILY["gpt_oss"], "intermediate_size": recipes._COMMON["hidden_size"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes._FAMILY, "gpt_oss", square)
        sizes = expected(cell("gpt_oss", "ep2"), folder).config
        assert sizes["hidden_size"] == sizes["intermediate_size"]
        with Shared(shared_world, "moeref_conformance.selftest.faulty:by_tag", grace=1.0) as world:
            yield Bench(world, folder, by_tag)


def red(outcomes: dict[str, Outcome]) -> set[str]:
    return {rule for rule, outcome in outcomes.items() if outcome.findings}


def test_the_good_target_stays_green(bench: Bench) -> None:
    outcomes = bench.judge(cell("gpt_oss", "ep2"))
    assert red(outcomes) == set()
    assert not [rule for rule, outcome in outcomes.items() if outcome.untested]


@pytest.mark.parametrize(
    ("fault", "rules", "first"),
    [
        ("down-proj-not-transposed", {"LOD-001", "FWD-001"}, "LOD-001"),
        ("down-proj-exported-untransposed", {"EXP-002"}, "EXP-002"),
    ],
)
def test_a_missing_transpose_turns_values_red(bench: Bench, fault: str, rules: set[str], first: str) -> None:
    outcomes = bench.judge(cell("gpt_oss", "ep2", tags=(f"fault:{fault}",)), one_rank=FAULTS[fault].one_rank)
    assert red(outcomes) == rules
    assert all("equals its transpose" in finding.diagnosis for finding in outcomes[first].findings)
