"""RPL-004 and RPL-008 in bf16: logits and gradients under replay are transformers' up to a few times its rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from moeref_conformance.contract.api import Cell
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.training import scaled
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
CELL = cell("qwen3_moe", "tp2-ep2", replay="R3", dtype="bfloat16")
#: A token without a route takes another expert in bf16 than in fp32, and others in the layers behind.
TURNED = cell("glm4_moe", "tp2-ep2", layers=5, replay="R3", dtype="bfloat16")
#: Rounding adds up towards the first layers, which one stage has; attention with sinks adds more under TP.
EARLY = cell("gpt_oss", "pp2", layers=8, replay="R3", dtype="bfloat16")
SINKS = cell("gpt_oss", "tp2-ep2-etp1", layers=8, replay="R3", dtype="bfloat16")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld, variants: Path) -> Iterator[Bench]:
    with Shared(shared_world, "moeref_conformance.selftest.training:scaled", grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("scaled"), scaled, inputs=variants)


@pytest.mark.parametrize("one", [CELL, TURNED, EARLY, SINKS], ids=lambda one: f"{one.family}-{one.layout_name}")
def test_replayed_logits_and_gradients_are_transformers(bench: Bench, one: Cell) -> None:
    outcomes = bench.judge(one)
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}
    whole, each = outcomes["RPL-008"].met.split("; each tensor ")
    for met, most in ((outcomes["RPL-004"].met, 0.03), (whole, 0.08), (each, 0.5)):
        far, limit = map(float, met.split(" ≤ "))
        assert 0 < far <= limit <= most


def test_a_tenth_too_much_is_noticed(bench: Bench) -> None:
    outcomes = bench.judge(replace(CELL, tags=("1.1",)))
    assert [rule for rule, o in outcomes.items() if o.findings] == ["RPL-008"]
    assert "step-a: the gradients are off transformers' by 0.1" in outcomes["RPL-008"].findings[0].message
