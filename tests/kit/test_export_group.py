"""An export inside a group: where engines share the world with trainers, layout ranks are not global ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
RUN = """
import sys
import torch, torch.distributed as dist
from moeref.bridge import ShardMap
from moeref.exporter import Plan, export
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
trainers = dist.new_group([1, 2])
if rank:
    table = ShardMap(model("qwen3_moe", num_hidden_layers=2), Layout.parse("pp=2"))
    mine = dist.get_rank(trainers)
    chunks = holder(table, mine, value=float(rank))
    seen = {t.name: full for t, full in export(Plan(table), mine, chunks, trainers)}
    if mine == 0:
        assert (seen["model.layers.0.self_attn.q_proj.weight"] == 1).all()
        assert (seen["model.layers.1.self_attn.q_proj.weight"] == 2).all()
        assert None not in seen.values()
    else:
        assert set(seen.values()) == {None}
dist.barrier()
"""


def test_layout_ranks_are_ranks_of_the_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path / "store")]) for r in range(3)]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
