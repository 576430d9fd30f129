"""An export into buckets next to a released bridge's of as many bytes in the same buckets, and its stream alone.

Run in the bridge's session: `nox -s 'peers(mbridge)' -- --bench`. Bars: 2.5 × the fastest on one rank, 3 × on two. What
is measured takes turns, from barrier to barrier, best of four; ranks that share few cores count with their CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from moeref import families
from moeref.bridge import ShardMap
from moeref.exporter import Lender, Plan, buckets, export
from moeref.layout import Layout
from tests.unit.test_loader import holder

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples" / "defects"))
import by_hand

PEER = os.environ.get("MOEREF_PEER", "")
pytestmark = [
    pytest.mark.bench,
    pytest.mark.ranks,
    pytest.mark.skipif(not PEER, reason="the session of each bridge measures that bridge"),
]
#: Layers, experts and the experts' width. In fp32, with half the hidden size, as many bytes and tensors as in bf16.
MODELS = {"A": (8, 64, 256), "B": (8, 256, 64)}
#: How many times moeref's CPU fits in the bridge's, at least, where every rank receives.
LEAST = {"world=1": 2.5, "tp=2": 1.5, "pp=2": 1.5, "ep=2,world=2": 1.5}
LIMIT, ROUNDS = 64 << 20, 4


def rank(peer: str, folder: str, layout: str) -> dict[str, list[float]]:
    """Seconds of the clock, and of the CPU of all ranks."""
    torch.set_num_threads(1)
    bridge = by_hand.PROJECTS[peer](folder)
    bridge.load()
    shard_map = ShardMap(families.read(json.loads(Path(folder, "config.json").read_text())), Layout.parse(layout))
    mine, lender = dist.get_rank(), Lender()
    plans = {"all": Plan(shard_map, receivers="all"), "writer": Plan(shard_map)}
    held = holder(shard_map, mine)

    def into_buckets(stream: Any) -> None:
        for bucket in buckets(stream, LIMIT, lend=lender):
            del bucket

    todo: dict[str, Callable[[], Any]] = {
        f"{peer}, stream alone": lambda: deque(bridge.export(), maxlen=0),
        peer: lambda: into_buckets(bridge.export()),
        "moeref, all receive": lambda: into_buckets(export(plans["all"], mine, held)),
        "moeref, one receives": lambda: into_buckets(export(plans["writer"], mine, held)),
    }
    best = {what: [float("inf"), float("inf")] for what in todo}
    for _ in range(ROUNDS):
        for what, run in todo.items():
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            run()
            cpu = torch.tensor(time.process_time() - began[1])
            dist.all_reduce(cpu)
            best[what] = list(map(min, best[what], (time.perf_counter() - began[0], float(cpu))))
    return best


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    layers, experts, width = MODELS[request.param]
    sizes = {"num_hidden_layers": layers, "num_experts": experts, "moe_intermediate_size": width, "hidden_size": 256}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000}
    made = str(tmp_path_factory.mktemp(request.param))
    by_hand.checkpoint(made, by_hand.QWEN3 | sizes)
    return made


@pytest.mark.parametrize("layout", LEAST)
def test_of_a_bridge(folder: str, layout: str) -> None:
    parsed = Layout.parse(layout)
    sizes = {"tensor_model_parallel_size": parsed.tp, "pipeline_model_parallel_size": parsed.pp}
    sizes |= {"expert_model_parallel_size": parsed.ep, "expert_tensor_parallel_size": parsed.etp}
    best = by_hand.on_ranks(parsed.world, rank, PEER, folder, layout, **sizes)[0]
    told = ", ".join(f"{what} {1e3 * clock:.0f} ms ({1e3 * cpu:.0f} of CPU)" for what, (clock, cpu) in best.items())
    Console(width=240).print(f"{folder}, {layout}: {told}")
    ratios = [theirs / ours for theirs, ours in zip(best[PEER], best["moeref, all receive"], strict=True)]
    Console(width=240).print(
        f"{ratios[0]:.1f} times as fast, {ratios[1]:.1f} times in CPU; bar {2.5 if parsed.world == 1 else 3}"
    )
    assert ratios[1] > LEAST[layout]
