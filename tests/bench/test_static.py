"""Arithmetic at the size of real models: judging Kimi-K2 at 8192 ranks, and planning exports.

Bars: under 10 s for the cell with all its rules, imports and the oracle's model aside. A plan with all that the first
export of one rank needs: under 0.5 s for Qwen3-30B, 2 s for Kimi-K2 at 8192 ranks, 40 ms for 6,219 tensors.
What goes where in the buckets of a rank that receives is worked out after that, and printed next to it.
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
from moeref.exporter import Plan, unit_of
from moeref.exporter.assembly import segments
from moeref.layout import Layout
from tests.unit.models import model

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


#: Sizes that give 6,219 tensors.
MANY = {"num_hidden_layers": 8, "num_experts": 256}


@pytest.mark.parametrize(
    ("name", "layout", "tensors", "bar"),
    [
        ("qwen3-30b-a3b", "tp=4,pp=2,ep=8,world=64", 18_867, 0.5),
        ("kimi-k2", "tp=8,pp=16,ep=64,etp=1,first=3,last=2,world=8192", 69_975, 2),
        ("many tensors", "tp=1", 6_219, 0.04),
        ("many tensors", "tp=2", 6_219, 0.04),
        ("many tensors", "tp=2,ep=2,etp=1", 6_219, 0.04),
    ],
)
def test_a_plan(name: str, layout: str, tensors: int, bar: float) -> None:
    large = model("qwen3_moe", **MANY) if name == "many tensors" else families.read(families.known(name))
    found = [_planned(large, Layout.parse(layout), tensors) for _ in range(5)]
    best, more = map(min, zip(*found, strict=True))
    Console(width=120).print(f"plan of {name} at {layout}: {best:.3f} s, bar {bar}; {more:.3f} for rank 0's buckets")
    assert best < bar


def _planned(large: families.Model, layout: Layout, tensors: int) -> tuple[float, float]:
    """Processor seconds of a plan, and of what goes where in the buckets of a rank that receives, once a plan."""
    unit_of.cache_clear()
    began = time.process_time()
    plan = Plan(ShardMap(large, layout))
    assert len(plan.tensors) == tensors
    assert plan.shard_map.local_shards(layout.world - 1)
    assert plan.batches
    assert plan.digest
    made = time.process_time()
    assert segments(plan, 0, 64 << 20, unit_of)
    return made - began, time.process_time() - made
