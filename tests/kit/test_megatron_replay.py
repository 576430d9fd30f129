"""megatron-core's RouterReplay used as it stands: right in plain layouts, and noticed where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moeref_conformance.resolve import resolve
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
TARGET = "moeref_conformance.selftest.megatron_replay:target"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld, variants: Path) -> Iterator[Bench]:
    with Shared(shared_world, TARGET, grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("naive"), resolve(TARGET), inputs=variants)


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_recorded_routes_replay_where_a_rank_has_one_chunk(bench: Bench, layout: str) -> None:
    outcomes = bench.judge(cell("qwen3_moe", layout, replay="R2"))
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}


def test_a_second_chunk_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both phases, whose findings share a pattern."""
    monkeypatch.setattr("moeref_conformance.judges.grouped", tuple)
    outcomes = bench.judge(cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R2"))
    found = outcomes["RPL-001"].findings
    assert {"replay", "recompute"} <= {f.message.partition(":")[0] for f in found}
    assert any("of sample" in f.diagnosis for f in found)


def test_a_row_without_a_route_is_noticed(bench: Bench) -> None:
    outcomes = bench.judge(cell("qwen3_moe", "one", replay="R3"))
    assert [rule for rule, o in outcomes.items() if o.findings] == ["RUN-001"]
    assert "out of bounds" in outcomes["RUN-001"].findings[0].message
