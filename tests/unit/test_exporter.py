"""The arithmetic of an export: strided copies against regions, batches of messages; and a stream on one rank."""

from __future__ import annotations

import pytest
import torch

from moeref.bridge import ShardMap
from moeref.dtypes import DTYPES
from moeref.exporter import ExportError, Plan, export
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
                for size, into, source in plan.copies(param, part)[number]:
                    moved = shard.as_strided(size, source.strides, source.offset)
                    full.as_strided(size, into.strides, into.offset).copy_(moved)
                assert torch.equal(full, want), (param.name, tensor.name)


def test_a_tensor_is_one_copy_a_shard() -> None:
    """Also q of a fused QKV, whose KV groups are apart."""
    plan = Plan(ShardMap(model("qwen3_moe"), TP2))
    assert {len(copies) for _, param in plan.params for copies in plan.copies(param, 1)} == {1}


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("writer", [0, 5])
def test_every_shard_of_another_rank_travels_once(bucket_bytes: int, writer: int) -> None:
    shard_map = ShardMap(model("glm4_moe"), TP2)
    plan = Plan(shard_map, writer, bucket_bytes)
    assert [n for batch in plan.batches for n in batch.params] == list(range(len(plan.params)))
    travel = [
        (number, part, owner)
        for number, (_, param) in enumerate(plan.params)
        for part, owner in enumerate(shard_map.owners(param))
        if owner != writer
    ]
    sent = [(s.param, s.part, m.owner) for batch in plan.batches for m in batch.messages for s in m.shards]
    assert sorted(sent) == travel
    assert all(s.param in batch.params for batch in plan.batches for m in batch.messages for s in m.shards)
    for batch in plan.batches:
        _check_messages(plan, batch)
    if bucket_bytes == 1 << 30:
        assert len(plan.batches) == 1


def _check_messages(plan: Plan, batch: Batch) -> None:
    """Shards lie one behind the other, aligned, and the batch is no larger than half a bucket or has one parameter."""
    for message in batch.messages:
        end = ALIGNMENT
        for sent in message.shards:
            param = plan.params[sent.param][1]
            assert sent.offset % ALIGNMENT == 0
            assert 0 <= sent.offset - end < ALIGNMENT
            end = (
                sent.offset + DTYPES[param.dtype].bytes * torch.Size(plan.shard_map.shard(param, sent.part)[0]).numel()
            )
        assert 0 <= message.nbytes - end < ALIGNMENT
    travelling = {sent.param for message in batch.messages for sent in message.shards}
    assert batch.nbytes <= plan.bucket_bytes // 2 or len(travelling) == 1


def test_nothing_travels_on_one_rank() -> None:
    plan = Plan(ShardMap(model("qwen3_moe"), Layout()), bucket_bytes=1)
    assert [batch.messages for batch in plan.batches] == [()]


@pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, True])
def test_a_bucket_of_no_bytes_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ExportError, match="no number of bytes"):
        Plan(ShardMap(model("qwen3_moe"), Layout()), bucket_bytes=bucket_bytes)


def test_parameters_that_are_not_contiguous_are_exported() -> None:
    plan = Plan(ShardMap(model("qwen3_moe", num_hidden_layers=1), Layout()))
    chunks = holder(plan.shard_map, 0)
    norm = chunks[0].decoder.final_layernorm  # type: ignore[union-attr]
    wide = torch.arange(48.0)
    norm.weight.data = wide[::2]
    fulls = {tensor.name: full for tensor, full in export(plan, 0, chunks)}
    assert torch.equal(fulls["model.norm.weight"], wide[::2])  # type: ignore[arg-type]


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
