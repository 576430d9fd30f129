"""Loading and exporting on one rank, next to what the memory itself allows: one memcpy, and a loop of tensor copies.

pytest-benchmark prints each group side by side; the ratios are the result, the times are the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from moeref import families
from moeref.bridge import ShardMap, bind, hf_tensors, load
from moeref.exporter import Lender, Plan, buckets, export
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def table() -> ShardMap:
    """218 MB in bf16 and 2,321 tensors: small tensors are what exports choke on."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 512, "moe_intermediate_size": 96, "num_experts": 126}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 20_000}
    return ShardMap(model("qwen3_moe", **sizes, dtype="bfloat16"), Layout())


@pytest.fixture(scope="module")
def chunks(table: ShardMap) -> list[torch.nn.Module]:
    return holder(table, 0)


def _bytes(table: ShardMap) -> int:
    return sum(2 * torch.Size(t.shape).numel() for t in Plan(table).tensors)


@pytest.mark.benchmark(group="export")
def test_memcpy(benchmark: Any, table: ShardMap) -> None:
    source, into = torch.ones(_bytes(table), dtype=torch.uint8), torch.empty(_bytes(table), dtype=torch.uint8)
    benchmark(into.copy_, source)


@pytest.mark.benchmark(group="export")
def test_copy_tensor_by_tensor(benchmark: Any, table: ShardMap) -> None:
    sources = [torch.ones(t.shape, dtype=torch.bfloat16) for t in Plan(table).tensors]
    into = [torch.empty_like(s) for s in sources]

    def copy() -> None:
        for a, b in zip(into, sources, strict=True):
            a.copy_(b)

    benchmark(copy)


@pytest.mark.benchmark(group="export")
def test_export(benchmark: Any, table: ShardMap, chunks: list[torch.nn.Module]) -> None:
    plan = Plan(table)
    assert len(plan.tensors) == 6 * (3 * 126 + 9) + 3

    def stream() -> int:
        return sum(full is not None for _, full in export(plan, 0, chunks))

    assert benchmark(stream) == len(plan.tensors)


@pytest.mark.benchmark(group="export")
@pytest.mark.parametrize("lend", [True, False])
def test_export_into_buckets(benchmark: Any, table: ShardMap, chunks: list[torch.nn.Module], lend: bool) -> None:
    plan = Plan(table)

    def cut() -> int:
        return sum(bucket.nbytes for bucket in buckets(export(plan, 0, chunks), 64 << 20, lend=lend))

    assert benchmark(cut) >= _bytes(table)


#: Layers, experts and the experts' width of models in bf16: 457 MB in 1,611 tensors, 459 MB in 6,219.
MODELS = {"A": (8, 64, 256), "B": (8, 256, 64)}
#: Of memcpy, at least.
BARS = {"A": 0.6, "B": 0.4}


@pytest.mark.parametrize("name", MODELS)
def test_of_memcpy(name: str) -> None:
    """Alternating in one run, processor time, best of eight. Memory is touched before, as a trainer's is."""
    layers, experts, width = MODELS[name]
    sizes = {"num_hidden_layers": layers, "num_experts": experts, "moe_intermediate_size": width, "hidden_size": 512}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000}
    shard_map = ShardMap(model("qwen3_moe", **sizes, dtype="bfloat16"), Layout())
    plan, held, lender = Plan(shard_map), holder(shard_map, 0), Lender()
    source = torch.ones(_bytes(shard_map), dtype=torch.uint8)
    into = torch.empty_like(source)

    def exported(lend: Lender | bool) -> None:
        for bucket in buckets(export(plan, 0, held), 64 << 20, lend=lend):
            del bucket

    todo: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: into.copy_(source),
        "export into kept buckets": lambda: exported(lender),
        "export into own buckets": lambda: exported(False),
        "all of them held": lambda: list(buckets(export(plan, 0, held), 64 << 20)),
        "bind": lambda: bind(shard_map, 0, held),
    }
    best = dict.fromkeys(todo, float("inf"))
    for _ in range(8):
        for what, run in todo.items():
            began = time.process_time()
            run()
            best[what] = min(best[what], time.process_time() - began)
    memcpy, kept, own = (best[what] for what in ("memcpy", "export into kept buckets", "export into own buckets"))
    told = ", ".join(f"{what} {1e3 * seconds:.0f} ms ({memcpy / seconds:.2f})" for what, seconds in best.items())
    number = len(plan.tensors)
    each = 1e6 * (kept - memcpy) / number
    Console(width=200).print(f"{name}, {number} tensors, of memcpy: {told}; {each:.1f} µs a tensor beyond it")
    assert memcpy / max(kept, own) > BARS[name]


def _write(table: ShardMap, folder: Path) -> None:
    save_file({t.name: torch.ones(t.shape, dtype=torch.bfloat16) for t in hf_tensors(table)}, folder / "m.safetensors")


@pytest.mark.benchmark(group="load")
def test_load(benchmark: Any, table: ShardMap, chunks: list[torch.nn.Module], tmp_path: Path) -> None:
    save_file(
        {t.name: torch.ones(t.shape, dtype=torch.bfloat16) for t in hf_tensors(table)}, tmp_path / "m.safetensors"
    )
    benchmark(load, table, 0, chunks, tmp_path)


@pytest.mark.benchmark(group="load")
def test_read_the_file_whole(benchmark: Any, table: ShardMap, tmp_path: Path) -> None:
    save_file(
        {t.name: torch.ones(t.shape, dtype=torch.bfloat16) for t in hf_tensors(table)}, tmp_path / "m.safetensors"
    )
    benchmark(lambda: [t.clone() for t in load_file(tmp_path / "m.safetensors").values()])


@pytest.mark.benchmark(group="plan")
def test_plan_of_qwen3_30b(benchmark: Any) -> None:
    """18,867 tensors at TP2·PP4·EP8: plan and one rank's table, without weights or a collective."""
    big = families.read(families.known("qwen3-30b-a3b"))

    def plan() -> int:
        made = ShardMap(big, Layout.parse("tp=2,pp=4,ep=8,etp=1,world=64"))
        made.local_shards(63)
        return len(Plan(made).tensors)

    assert benchmark(plan) == 18_867
