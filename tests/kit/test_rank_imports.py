"""What makes ranks cheap: imports before the fork, and a scheduling policy.

torch's compiler alone takes as long as a small cell, and without the policy gloo's threads spin for each other's locks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bench import Bench
from moeref_conformance.plan import matrix
from moeref_conformance.targets.moeref import target
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


CELLS = (
    "qwen3_moe/tp2-ep2-etp1/gloo",
    "qwen3_moe+R2/tp2-pp2-vpp2-ep2-etp1/gloo",
    "qwen3_moe+optimizer-step/one/gloo",
    "qwen3_next+optimizer-step/tp2-ep2-etp1/gloo",
    "glm4_moe+mtp1+optimizer-step/pp2-vpp2-ep2/gloo",
)


@pytest.mark.parametrize("cell", CELLS)
def test_a_rank_imports_nothing_of_weight(cell: str, shared_world: ForkedWorld, tmp_path: Path) -> None:
    (chosen,) = matrix.load("cpu").select([cell])
    world = Shared(shared_world, "moeref_conformance.targets.moeref:target", entry="rank_imports:run")
    Bench(world, tmp_path, target).observe(chosen, 60)
    assert {json.loads(file.read_text()) for file in tmp_path.rglob("policy.json")} == {os.SCHED_BATCH}
    imported = [json.loads(file.read_text()) for file in tmp_path.rglob("imported.json")]
    assert len(imported) == chosen.layout.world
    heavy = ("megatron", "moeref", "numpy", "torch", "transformers")
    assert [name for names in imported for name in names if name.partition(".")[0] in heavy] == []
