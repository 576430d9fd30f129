"""A thousand exports in two ranks over gloo: resident memory grows by less than 4 MiB in the last 800."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moeref.bridge import ShardMap
from moeref.exporter.plan import Plan
from moeref.exporter.stream import export
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder

pytestmark = [pytest.mark.bench, pytest.mark.ranks]
EXPORTS, WARM = 1000, 200
#: Most growth over the exports after the first WARM, in KiB. A leak of 16 KiB an export would be 12,800.
GROWTH = 4096


def resident() -> int:
    """Resident memory of this process in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def slope(curve: list[int]) -> float:
    """KiB an export, of the straight line nearest to the curve after WARM exports."""
    return float(np.polyfit(np.arange(WARM, len(curve)), curve[WARM:], 1)[0])


def rank(rank: int, folder: str, leak: int) -> None:
    """Export again and again; `leak`: bytes that each export leaves behind."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shard_map = ShardMap(model("glm4_moe", num_hidden_layers=2), Layout.parse("tp=2,ep=2,etp=1"))
    plan, chunks, curve, left = Plan(shard_map), holder(shard_map, rank), [], []
    for version in range(EXPORTS):
        for _, tensor in export(plan, rank, chunks, version=version):
            del tensor
        left.append(os.urandom(leak))
        curve.append(resident())
    Path(folder, f"{rank}.json").write_text(json.dumps(curve))
    dist.destroy_process_group()


@pytest.mark.parametrize("leak", [0, 16 << 10])
def test_memory_stays_flat(tmp_path: Path, leak: int) -> None:
    torch.multiprocessing.spawn(rank, (str(tmp_path), leak), nprocs=2)
    curves = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    for number, curve in enumerate(curves):
        grown = slope(curve) * (EXPORTS - WARM)
        print(f"\nrank {number}, {EXPORTS} exports, {leak} bytes leaked in each: {slope(curve):+.3f} KiB an export,")
        print(f"   {curve[WARM]} KiB after {WARM}, {curve[-1]} KiB after {EXPORTS}")
        assert (grown < GROWTH) == (leak == 0)
