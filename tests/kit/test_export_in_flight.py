"""An export between ranks: what arrives for any size of bucket, how much memory it takes, and how a failure ends it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import warm

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]

#: TP 2 in two data-parallel replicas: ranks 2 and 3 send nothing.
RUN = """
import datetime, gc, json, pathlib, sys, time, weakref
import torch, torch.distributed as dist
from moeref.bridge import ShardMap, inventory
from moeref.exporter import ExportError, Lender, Plan, buckets, export, peer, transfer
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder

rank, store = int(sys.argv[1]), pathlib.Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4,
                        timeout=datetime.timedelta(seconds=60))
said = {"seconds": {}, "peak": {}}
tied = model("qwen3_moe", num_hidden_layers=2, num_experts=8)
table = ShardMap(tied, Layout.parse("tp=2,world=4"))
alone = Plan(ShardMap(tied, Layout()))
chunks = holder(table, rank)
torch.manual_seed(0)
for (_, name), tensor in inventory(chunks).items():
    tensor.copy_(torch.randn(tensor.shape))

alive = []
real = peer.Peer.bytes
def counted(self, count):
    made = real(self, count)
    alive.append(weakref.ref(made.untyped_storage()))
    return made
peer.Peer.bytes = counted

def in_use():
    return sum(s.nbytes() for ref in alive if (s := ref()) is not None)

def streamed(plan, **options):
    peak, out = 0, {}
    for tensor, full in export(plan, rank, chunks, **options):
        peak = max(peak, in_use())
        out[tensor.name] = full
    return out, peak

def ask(name, what):
    start = time.monotonic()
    try:
        what()
        said[name] = "nothing"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
    said["seconds"][name] = time.monotonic() - start
    gc.collect()
    dist.barrier()

whole, _ = streamed(Plan(table))
for bucket in (1, 20_000, 60_000, 1 << 20):
    for writer in (0, 1):
        again, peak = streamed(Plan(table, writer, bucket))
        full = next(iter(again.values()))
        said["peak"][f"{bucket} {writer}"] = peak
        if rank == writer == 0:
            assert list(again) == list(whole)
            assert all(torch.equal(again[name], whole[name]) for name in whole)
        assert (rank == writer) == (full is not None)

lender = Lender(2)
for limit in (1, 30_000, 1 << 20):
    again, found = {}, None
    for found in buckets(export(Plan(table, 0, 20_000), rank, chunks), limit, lend=lender):
        again |= {name: tensor.clone() for name, tensor in found.tensors()}
    assert (found is not None) == (rank == 0)
    assert list(again) == (list(whole) if rank == 0 else [])
    assert all(torch.equal(again[name], whole[name]) for name in again)

plan = Plan(table, in_flight_bytes=20_000)
names = [tensor.name for tensor in plan.tensors]

def failing(at, count, plain=False):
    def what():
        if plain:
            for number, _ in enumerate(export(plan, rank, chunks)):
                if rank == at and number == count:
                    raise KeyError("mine")
        else:
            with export(plan, rank, chunks) as stream:
                if rank == at and count < 0:
                    raise KeyError("mine")
                for number, _ in enumerate(stream):
                    if rank == at and number == count:
                        raise KeyError("mine")
    return what

def failing_bucket():
    with export(plan, rank, chunks) as stream:
        for bucket in buckets(stream, 30_000):
            if bucket.number == 1:
                said["bucket"] = bucket.entries[-1].name
                raise KeyError("mine")

ask("in a bucket", failing_bucket)
for at in (0, 1, 2):
    ask(f"block {at}", failing(at, 30))
    ask(f"loop {at}", failing(at, 30, plain=True))
ask("before", failing(1, -1))
ask("first", failing(1, 0))
ask("last", failing(0, len(names) - 1))
ask("version", lambda: streamed(plan, version=7 if rank == 1 else 6))
ask("other bucket", lambda: streamed(Plan(table, in_flight_bytes=20_000 + rank)))

pack, calls = transfer.Transfer._pack, []
def no_room(self, parcel):
    calls.append(parcel.message)
    if len(calls) == 3:
        raise RuntimeError("out of memory")
    return pack(self, parcel)
transfer.Transfer._pack = no_room
ask("packing", lambda: streamed(plan))
transfer.Transfer._pack = pack
ask("good", lambda: streamed(plan))

dist.broadcast_object_list(held := [whole], 0)
(everything,) = held
OPTIONS = {"writer": {}, "node": {"ranks_per_node": 2}, "share": {}, "all": {}}
for receivers, more in OPTIONS.items():
    for bucket in (1, 60_000):
        plan = Plan(table, 0, bucket, receivers, **more)
        again, peak = streamed(plan)
        said["peak"][f"{bucket} {receivers}"] = peak
        got = {name: full for name, full in again.items() if full is not None}
        assert list(again) == names and list(got) == [t.name for t in plan.received(rank)]
        assert receivers == "share" or bool(got) == (rank in {"writer": [0], "node": [0, 2]}.get(receivers, range(4)))
        assert all(torch.equal(got[name], everything[name]) for name in got)
        lender, cut = Lender(2), {}
        for found in buckets(export(plan, rank, chunks), 30_000, lend=lender):
            cut |= {name: tensor.clone() for name, tensor in found.tensors()}
        assert list(cut) == list(got) and all(torch.equal(cut[name], got[name]) for name in cut)
    plan = Plan(table, 0, 20_000, receivers, **more)
    for at in range(4):
        ask(f"{receivers} {at}", failing(at, 30))
ask("other receivers", lambda: streamed(Plan(table, receivers="all" if rank == 1 else "share")))
try:
    list(buckets(export(Plan(table, receivers="share"), rank, chunks), 30_000, unit=lambda name: "one"))
except Exception as error:
    said["unit"] = f"{type(error).__name__}: {error}"
dist.barrier()
said["name"] = names[30]
store.with_name(f"said{rank}.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("export")
    done = warm.run_all(warm.of_ranks(RUN, 4, str(folder / "store")), cwd=folder)
    assert [rank.returncode for rank in done] == [0] * 4, done[0].stderr
    return [json.loads((folder / f"said{r}.json").read_text()) for r in range(4)]


def test_messages_take_no_more_than_a_bucket(said: list[dict[str, Any]]) -> None:
    """With a bucket too small for one parameter, its shards are all that a rank holds: the embedding's 2 · 128 rows.

    One of many receivers may hold both halves: it sends one, or another rank has both.
    """
    embedding = 128 * 24 * 4
    for peaks in (one["peak"] for one in said):
        for case, peak in peaks.items():
            bucket, receivers = case.split()
            halves = 1 if receivers in ("0", "1", "writer") else 2
            assert peak <= max(int(bucket), halves * embedding), case
    assert said[0]["peak"]["60000 0"] > 30_000
    assert min(one["peak"]["60000 all"] for one in said) > 30_000
    assert said[3]["peak"]["60000 0"] == said[3]["peak"]["60000 writer"] == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_of_a_consumer_ends_all_ranks(said: list[dict[str, Any]], at: int) -> None:
    for rank, one in enumerate(said):
        told = f"ExportError: qwen3_moe, rank {rank}: rank {at} "
        mine = "KeyError: 'mine'"
        assert one[f"block {at}"] == (mine if rank == at else f"{told}failed at {one['name']}: {mine}")
        after = f"{told}stopped after {one['name']}: its own error says why"
        assert one[f"loop {at}"] == (mine if rank == at else after)
        assert one["seconds"][f"block {at}"] < 10


def test_an_error_of_a_consumer_of_buckets_ends_all_ranks(said: list[dict[str, Any]]) -> None:
    assert said[0]["in a bucket"] == "KeyError: 'mine'"
    for rank, one in list(enumerate(said))[1:]:
        where = f"ExportError: qwen3_moe, rank {rank}: rank 0 failed at {said[0]['bucket']}"
        assert one["in a bucket"] == f"{where}: KeyError: 'mine'"
    assert max(one["seconds"]["in a bucket"] for one in said) < 10


def test_an_error_before_the_first_tensor_sends_nothing(said: list[dict[str, Any]]) -> None:
    refused = "ranks [1] refused (their own error says why); nothing was sent"
    for rank, one in enumerate(said):
        assert one["before"] == ("KeyError: 'mine'" if rank == 1 else f"ExportError: qwen3_moe, rank {rank}: {refused}")
        assert one["first"].endswith("'mine'")
        assert one["last"].endswith("'mine'")


def test_versions_and_buckets_are_agreed(said: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(said):
        others = [r for r in range(4) if (r == 1) != (rank == 1)]
        why = f"ExportError: qwen3_moe, rank {rank}: ranks {others} plan otherwise"
        assert one["version"].startswith(why)
        assert "plan otherwise" in one["other bucket"]


def test_an_error_in_flight_names_tensors_and_rank(said: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(said):
        assert "self_attn.o_proj.weight to model.layers.0.mlp.experts.0.gate_proj.weight, from" in one["packing"]
        assert "from rank 1 to rank 0: out of memory" in one["packing"]
        assert rank == 1 or one["packing"].startswith(f"ExportError: qwen3_moe, rank {rank}: rank 1 failed at ")
    assert [one["good"] for one in said] == ["nothing"] * 4


@pytest.mark.parametrize("receivers", ["writer", "node", "share", "all"])
@pytest.mark.parametrize("at", range(4))
def test_an_error_on_one_rank_ends_all_whoever_receives(said: list[dict[str, Any]], receivers: str, at: int) -> None:
    for rank, one in enumerate(said):
        mine = "KeyError: 'mine'"
        told = f"ExportError: qwen3_moe, rank {rank}: rank {at} failed at {one['name']}: {mine}"
        assert one[f"{receivers} {at}"] == (mine if rank == at else told)
        assert one["seconds"][f"{receivers} {at}"] < 10


def test_receivers_are_agreed(said: list[dict[str, Any]]) -> None:
    assert all("plan otherwise; nothing was sent" in one["other receivers"] for one in said)


def test_a_unit_that_goes_to_several_ranks_is_refused_on_all(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["unit"].endswith("goes to another rank than others of one, which a loader needs whole")
