"""Arithmetic at the size of real models: judging Kimi-K2 at 8192 ranks, and planning Qwen3-30B.

Bars: under 10 s for the cell with all its rules, imports and the oracle's model aside; under 0.5 s for the plan.
"""

from __future__ import annotations

import time

import pytest
from moeref_conformance.oracles import published
from moeref_conformance.plan.plan import Settings
from moeref_conformance.run.machinery import served
from moeref_conformance.run.runner import Runner
from rich.console import Console

from moeref import families
from moeref.bridge import ShardMap
from moeref.exporter import Plan
from moeref.layout import Layout

pytestmark = pytest.mark.bench
CELL = "kimi-k2/tp8-pp16-ep64-etp1-first3-last2-w8192/static"
#: Judged first, so that megatron-core and transformers are imported before the clock starts.
SMALL = "qwen3-30b-a3b/one/static"


def test_a_trillion_parameters_on_8192_ranks() -> None:
    settings = Settings(target="moeref", matrix="static", cells=(SMALL, CELL), rules=("NAM", "PLN"))
    began = time.monotonic()
    published.tensors("kimi-k2", "per_expert")
    oracle = time.monotonic() - began
    with served(settings) as (plan, parts), Runner.opened(plan, parts) as runner:
        small, large = sorted(plan.cells, key=lambda cell: cell.layout.world)
        runner.cell(small)
        began = time.monotonic()
        verdicts, asked = runner.cell(large)
        seconds = time.monotonic() - began
    assert {v.status for v in verdicts if v.rule.startswith(("NAM", "PLN"))} == {"pass"}
    rules = ", ".join(f"{v.rule} {v.seconds:.2f}" for v in verdicts if v.seconds)
    Console(width=120).print(f"{CELL}: {seconds:.1f} s, moeref's answers {asked:.1f}; {rules}; oracle {oracle:.1f}")
    assert seconds < 10


def test_a_plan_of_qwen3_30b() -> None:
    model = families.read(families.known("qwen3-30b-a3b"))
    best = min(_planned(model) for _ in range(5))
    Console(width=120).print(f"plan of qwen3-30b-a3b at TP4·PP2·EP8: {best:.3f} s")
    assert best < 0.5


def _planned(model: families.Model) -> float:
    began = time.monotonic()
    assert len(Plan(ShardMap(model, Layout.parse("tp=4,pp=2,ep=8,world=64"))).tensors) == 18_867
    return time.monotonic() - began
