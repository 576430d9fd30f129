"""Predicted bytes against what megatron-core's modules, DDP buffers and optimizers allocate on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moeref import families
from moeref.bridge import ShardMap
from moeref.costs import Training, states
from moeref.layout import Layout
from tests import warm

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import models

pytestmark = pytest.mark.cpu
#: Stated in docs/how-to/check-a-run.md.
STATES_WITHIN = 0.05
REPLICATED = {"use_distributed_optimizer": False}
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3_moe", "tp=1,world=1", {}, "bfloat16"),
    ("qwen3_moe", "tp=2,ep=2,etp=1,world=8", REPLICATED, "bfloat16"),
    ("qwen3_moe", "tp=2,pp=2,ep=2,etp=1,world=16", {"grad_reduce_in_fp32": False}, "bfloat16"),
    ("qwen3_moe", "ep=4,world=8", {**REPLICATED, "grad_reduce_in_fp32": False}, "bfloat16"),
    ("qwen3_moe", "ep=4,world=8", {}, "float32"),
    ("glm4_moe", "tp=2,pp=2,ep=4,etp=1,world=32", {}, "bfloat16"),
    ("glm4_moe", "pp=2,vpp=2,ep=2,world=16", {}, "bfloat16"),
    ("deepseek_v3", "tp=2,pp=2,ep=8,etp=1,world=64", {}, "bfloat16"),
    ("glm4_moe_lite", "ep=8,world=16", REPLICATED, "bfloat16"),
    ("gpt_oss", "tp=2,ep=2,etp=1,world=8", {}, "bfloat16"),
    ("qwen3_next", "tp=2,ep=4,etp=1,world=8", {}, "bfloat16"),
    ("mixtral", "tp=2,ep=1,etp=1,world=8", {}, "bfloat16"),
]


def large_enough(config: dict[str, Any]) -> dict[str, Any]:
    """The small config, wider: alignment and counters of a few bytes do not decide."""
    return {**config, "hidden_size": 64, "vocab_size": 1000}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    out = tmp_path_factory.mktemp("costs") / "found.jsonl"
    cases = [
        {"config": large_enough(models.CONFIGS[family]), "layout": layout, "training": training, "dtype": dtype}
        for family, layout, training, dtype in CASES
    ]
    program = f"import cost_allocations\ncost_allocations.main({str(out)!r}, {cases!r})"
    forget = ["megatron", "moeref", "moeref_conformance"]
    done = warm.run(program, cwd=out.parent, path=[str(Path(__file__).parent)], forget=forget)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_weights_gradients_and_optimizer_are_what_megatron_allocates(measured: list[dict[str, int]]) -> None:
    found = iter(measured)
    for family, text, training, dtype in CASES:
        layout = Layout.parse(text)
        model = families.read(large_enough(models.CONFIGS[family]), dtype)
        shard_map = ShardMap(model, layout)
        for pp in range(layout.pp):
            shards = shard_map.local_shards(layout.rank_of(tp=0, pp=pp))
            predicted, real = states(shards, layout, Training(**training)), next(found)
            for name in ("weights", "gradients", "optimizer", "step"):
                assert getattr(predicted, name) == pytest.approx(real[name], rel=STATES_WITHIN, abs=4096), (
                    f"{family} {text} {training} {dtype} pp {pp}: {name} of {predicted}, {real}"
                )
    assert next(found, None) is None
