"""The arithmetic of an export: strided copies against regions, batches of messages; and a stream on one rank."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest
import torch

from moeref.bridge import ShardMap
from moeref.dtypes import DTYPES
from moeref.exporter import BucketError, ExportError, Plan, export, unit_of
from moeref.exporter.assembly import segments
from moeref.exporter.batches import ALIGNMENT, Batch
from moeref.layout import Layout
from tests.unit.models import CONFIGS, model
from tests.unit.test_loader import holder

pytestmark = pytest.mark.cpu
TP2 = Layout.parse("tp=2,pp=2,ep=2,etp=2,world=8")


@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
@pytest.mark.parametrize("family", CONFIGS)
def test_copies_move_what_the_regions_say(family: str, expert_format: str) -> None:
    shard_map = ShardMap(model(family), TP2).in_format(expert_format)  # type: ignore[arg-type]
    plan = Plan(shard_map)
    for _, param in plan.params:
        for part in range(len(shard_map.owners(param))):
            shape, regions = shard_map.shard(param, part)
            shard = torch.randn(shape)
            for number, tensor in enumerate(param.hf):
                full, want = torch.zeros(tensor.shape), torch.zeros(tensor.shape)
                for region in regions:
                    if region.tensor == number:
                        place = want[region.hf_index]
                        (place.mT if region.transposed else place).copy_(shard[region.shard_index])
                for size, into, source in plan.copies(param)[part][number]:
                    moved = shard.as_strided(size, source.strides, source.offset)
                    full.as_strided(size, into.strides, into.offset).copy_(moved)
                assert torch.equal(full, want), (param.name, tensor.name)


def test_a_tensor_is_one_copy_a_shard() -> None:
    """Also q of a fused QKV, whose KV groups are apart."""
    plan = Plan(ShardMap(model("qwen3_moe"), TP2))
    assert {len(copies) for _, param in plan.params for part in plan.copies(param) for copies in part} == {1}


#: Options of a plan, and the ranks of 8 that each means.
RECEIVERS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "writer": ({}, {0}),
    "writer 5": ({"writer": 5}, {5}),
    "node": ({"receivers": "node", "ranks_per_node": 3}, {0, 3, 6}),
    "share": ({"receivers": "share"}, set(range(8))),
    "all": ({"receivers": "all"}, set(range(8))),
}


@pytest.mark.parametrize("in_flight_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("receivers", RECEIVERS)
def test_every_shard_of_another_rank_travels_once(in_flight_bytes: int, receivers: str) -> None:
    shard_map = ShardMap(model("glm4_moe"), TP2)
    options, ranks = RECEIVERS[receivers]
    plan = Plan(shard_map, in_flight_bytes=in_flight_bytes, **options)
    assert [n for batch in plan.batches for n in batch.params] == list(range(len(plan.params)))
    assert {rank for to in plan.to for rank in to} == ranks
    travel = [
        (number, part, owner, rank)
        for number, (_, param) in enumerate(plan.params)
        for part, owner in enumerate(shard_map.owners(param))
        for rank in plan.to[number]
        if owner != rank
    ]
    messages = [m for batch in plan.batches for m in batch.messages]
    sent = [(s.param, s.part, m.owner, r) for m in messages for s in m.shards for r in m.receivers if m.owner != r]
    assert sorted(sent) == travel
    assert all(s.param in batch.params for batch in plan.batches for m in batch.messages for s in m.shards)
    for batch in plan.batches:
        _check_messages(plan, batch)
        held = [sum(m.nbytes for m in batch.messages if rank in (m.owner, *m.receivers)) for rank in range(8)]
        assert max(held) == batch.nbytes
    if in_flight_bytes == 1 << 30:
        assert len(plan.batches) == 1


@pytest.mark.parametrize("family", CONFIGS)
def test_shares_are_whole_units_of_about_as_many_bytes(family: str) -> None:
    plan = Plan(ShardMap(model(family), TP2), receivers="share")
    shares = [plan.received(rank) for rank in range(8)]
    assert sorted(t for share in shares for t in share) == sorted(plan.tensors)
    units = [{unit_of(t.name) for t in share} for share in shares]
    assert sum(map(len, units)) == len(set.union(*units))
    sizes = dict.fromkeys(set.union(*units), 0)
    for tensor in plan.tensors:
        sizes[unit_of(tensor.name)] += prod(tensor.shape) * DTYPES[tensor.dtype].bytes
    loads = [sum(sizes[unit] for unit in share) for share in units]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"receivers": "both"}, "receivers='both' is none of writer, node, share, all"),
        ({"receivers": "all", "writer": 1}, "writer=1 goes with receivers=\"writer\", not 'all'"),
        ({"receivers": "node"}, "ranks_per_node=None with receivers='node': say how many ranks a node has"),
        ({"ranks_per_node": 8}, "ranks_per_node=8 with receivers='writer': only receivers=\"node\" has it"),
        ({"receivers": "node", "ranks_per_node": 0}, "ranks_per_node=0 is no number of ranks"),
        ({"receivers": "node", "ranks_per_node": True}, "ranks_per_node=True is no number of ranks"),
    ],
)
def test_options_that_name_no_receivers_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ExportError, match=re.escape(says)):
        Plan(ShardMap(model("qwen3_moe"), TP2), **options)


def _check_messages(plan: Plan, batch: Batch) -> None:
    """Shards lie one behind the other, aligned, and the batch is no larger than half a bucket or has one parameter."""
    for message in batch.messages:
        end = 0
        for sent in message.shards:
            param = plan.params[sent.param][1]
            assert sent.offset % ALIGNMENT == 0
            assert 0 <= sent.offset - end < ALIGNMENT
            end = (
                sent.offset + DTYPES[param.dtype].bytes * torch.Size(plan.shard_map.shard(param, sent.part)[0]).numel()
            )
        assert 0 <= message.nbytes - end < ALIGNMENT
    travelling = {sent.param for message in batch.messages for sent in message.shards}
    assert batch.nbytes <= plan.in_flight_bytes // 2 or len(travelling) == 1


def test_nothing_travels_on_one_rank() -> None:
    plan = Plan(ShardMap(model("qwen3_moe"), Layout()), in_flight_bytes=1)
    assert [batch.messages for batch in plan.batches] == [()]


@pytest.mark.parametrize("in_flight_bytes", [0, -1, 1.5, True])
def test_no_bytes_in_flight_are_refused(in_flight_bytes: int) -> None:
    with pytest.raises(ExportError, match="no number of bytes"):
        Plan(ShardMap(model("qwen3_moe"), Layout()), in_flight_bytes=in_flight_bytes)


def test_parameters_that_are_not_contiguous_are_exported() -> None:
    plan = Plan(ShardMap(model("qwen3_moe", num_hidden_layers=1), Layout()))
    chunks = holder(plan.shard_map, 0)
    norm = chunks[0].decoder.final_layernorm  # type: ignore[union-attr]
    wide = torch.arange(48.0)
    norm.weight.data = wide[::2]
    fulls = {tensor.name: full for tensor, full in export(plan, 0, chunks)}
    assert torch.equal(fulls["model.norm.weight"], wide[::2])  # type: ignore[arg-type]


@pytest.mark.parametrize("receivers", ["writer", "share"])
def test_a_unit_that_is_apart_is_refused_on_every_rank(receivers: Any) -> None:
    """A rank that refuses alone would leave the others waiting for it."""
    plan = Plan(ShardMap(model("qwen3_moe"), Layout.parse("tp=2")), receivers=receivers)
    first, *_, last = (tensor.name for tensor in plan.received(0))
    for rank in (0, 1):
        with pytest.raises(BucketError, match="other tensors came since"):
            segments(plan, rank, None, lambda name: "both" if name in (first, last) else name)


def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    plan = Plan(ShardMap(model("qwen3_moe", num_hidden_layers=1), Layout()))
    stream = export(plan, 0, holder(plan.shard_map, 0))

    def use() -> None:
        with stream:
            next(stream)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert list(stream) == []
