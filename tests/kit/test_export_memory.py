"""What an export into buckets takes beyond the model, messages and buckets together, as the kernel counts it.

That is `in_flight_bytes`, or the largest parameter where it is larger, for the message, and the largest unit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import warm

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]

#: MiB that are no bucket, message or unit: Python's objects, gloo's, and what malloc keeps.
SLACK = 1
#: Each rank exports once before it counts, so that what stays for ever is there. Of malloc (-3 is M_MMAP_THRESHOLD) all
#: from 64 KiB on goes back to the kernel at once, else it keeps what came before. Linux resets a peak by clear_refs.
RUN = """
import collections, ctypes, itertools, json, math, pathlib, sys
import torch, torch.distributed as dist
from moeref.bridge import ShardMap
from moeref.exporter import Lender, Plan, buckets, export, unit_of
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder

ctypes.CDLL(None).mallopt(-3, 1 << 16)
rank, store, text = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
sizes = {"hidden_size": 256, "moe_intermediate_size": 384, "num_experts": 8, "vocab_size": 4096}
table = ShardMap(model("qwen3_moe", **sizes), Layout.parse(text))
chunks = holder(table, rank)

def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

def taken(plan):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, lender = status("VmRSS"), Lender(1)
    for bucket in buckets(export(plan, rank, chunks), lend=lender):
        pass
    return status("VmHWM") - before

said = {}
for receivers, bucket in itertools.product(("writer", "all"), (1 << 20, 8 << 20)):
    plan = Plan(table, 0, bucket, receivers)
    taken(plan)
    sizes = {tensor.name: 4 * math.prod(tensor.shape) for tensor in plan.tensors}
    units = collections.Counter()
    for name, size in sizes.items():
        units[unit_of(name)] += size
    may = max(bucket, *sizes.values()) + max(units.values())
    said[receivers, bucket] = {"took": taken(plan), "may": may / 2**20}
    dist.barrier()
store.with_name(f"said{rank}.json").write_text(json.dumps([*said.values()]))
"""


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "ep=2"])
def test_an_export_takes_a_bucket_and_the_largest_unit(layout: str, tmp_path: Path) -> None:
    done = warm.run_all(warm.of_ranks(RUN, 2, str(tmp_path / "store"), layout), cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr[-2000:]
    said = [one for rank in range(2) for one in json.loads((tmp_path / f"said{rank}.json").read_text())]
    assert max(one["took"] - one["may"] for one in said) < SLACK, said
    assert max(one["took"] / one["may"] for one in said) > 0.9, "less than is promised: promise less"
