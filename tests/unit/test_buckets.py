"""Buckets: any size gives the same tensors, units stay whole, lent memory is watched, messages are read or refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeref.bridge import Checkpoint, ShardMap, inventory
from moeref.exporter import Bucket, BucketError, Lender, Plan, buckets, export, read, unit_of
from moeref.exporter.buckets import MAGIC
from moeref.layout import Layout
from tests.unit.models import CONFIGS, model
from tests.unit.test_loader import holder

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(ShardMap(model("glm4_moe", num_hidden_layers=2), Layout()))


@pytest.fixture(scope="module")
def chunks(plan: Plan) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    made = holder(plan.shard_map, 0)
    for tensor in inventory(made).values():
        tensor.copy_(torch.randn(tensor.shape))
    return made


@pytest.fixture(scope="module")
def whole(plan: Plan, chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {tensor.name: full for tensor, full in export(plan, 0, chunks) if full is not None}


def units(bucket: Bucket) -> list[str]:
    return list(dict.fromkeys(unit_of(entry.name) for entry in bucket.entries))


@pytest.mark.parametrize("limit", [1, 5_000, 50_000, 500_000, 1 << 24])
@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("assembled", [False, True])
def test_any_size_gives_the_same(
    plan: Plan,
    chunks: list[torch.nn.Module],
    whole: dict[str, torch.Tensor],
    limit: int,
    lend: bool,
    assembled: bool,
) -> None:
    stream = export(plan, 0, chunks) if assembled else whole.items()
    kept: list[tuple[str, torch.Tensor]] = []
    seen: list[str] = []
    for number, bucket in enumerate(buckets(stream, limit, lend=lend)):
        assert bucket.number == number
        message = bucket.message()
        assert message.numel() <= limit or len(units(bucket)) == 1
        kept += [(name, tensor.clone()) for name, tensor in read(message).tensors()]
        seen += units(bucket)
        del message
    assert [name for name, _ in kept] == list(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in kept)
    assert len(seen) == len(set(seen))


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
#: A layer's tensors by what a loader needs whole, as families name them: fused QKV, MLA pairs, gate and up, experts.
WHOLE = {
    "model.layers.{}.self_attn": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias"),
    "model.layers.{}.mla.self_attn": ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    "model.layers.{}.mlp": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "model.layers.{}.mlp.shared_experts": ("gate_proj.weight", "up_proj.weight"),
    "model.layers.{}.mlp.experts": ("0.gate_proj.weight", "0.up_proj.weight", "1.gate_proj.weight", "1.up_proj.weight"),
    "model.layers.{}.input_layernorm": ("weight",),
}


@settings(max_examples=25, deadline=None)
@given(data=st.data(), limit=st.integers(1, 6_000), halves=st.integers(0, 3))
def test_any_order_size_and_limit_gives_the_same(data: st.DataObject, limit: int, halves: int) -> None:
    keys = [(whole, layer) for whole in WHOLE for layer in range(2)]
    tensors = {}
    for whole, layer in data.draw(st.permutations(keys)):
        for part in data.draw(st.permutations(WHOLE[whole])):
            rows = data.draw(st.integers(0, 40))
            tensors[f"{whole.format(layer)}.{part}"] = torch.randn(rows, 5).to(data.draw(st.sampled_from(DTYPES)))
    kept, last = {}, ""
    for bucket in buckets(tensors.items(), limit, lend=Lender(halves) if halves else False):
        found = units(bucket)
        assert last not in found
        last = found[-1]
        assert bucket.message().numel() <= limit or len(found) == 1
        kept |= {name: tensor.clone() for name, tensor in bucket.tensors()}
    assert list(kept) == list(tensors)
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())


IN_MEGATRONS_ORDER = (
    *("self_attn.o_proj", "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm"),
    *("post_attention_layernorm", "mlp.gate", "mlp.experts.0.up_proj"),
)


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made in the block held at a time, those of `model` aside."""

    def __init__(self, model: list[torch.Tensor]) -> None:
        super().__init__()
        self._model = {tensor.untyped_storage().data_ptr() for tensor in model}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            if storage.data_ptr() not in self._model:
                self._alive[storage.data_ptr()] = weakref.ref(storage)
        self.most = max(self.most, sum(s.nbytes() for ref in self._alive.values() if (s := ref()) is not None))
        return out


def unit_sizes(plan: Plan) -> dict[str, int]:
    """Bytes of each unit of a plan in fp32, and room for their descriptions."""
    sizes: dict[str, int] = {}
    for tensor in plan.tensors:
        sizes[unit_of(tensor.name)] = sizes.get(unit_of(tensor.name), 0) + 4 * torch.Size(tensor.shape).numel() + 300
    return sizes


@pytest.mark.parametrize("lend", [False, True])
def test_a_bucket_has_room_for_the_largest_unit_unless_a_limit_is_given(
    plan: Plan, chunks: list[torch.nn.Module], lend: bool
) -> None:
    found = []
    with Allocated([*inventory(chunks).values()]) as allocated:
        for bucket in buckets(export(plan, 0, chunks), lend=lend):
            found.append(units(bucket))
            bucket.expire() if not lend else None
            del bucket
    assert len(found) < len(unit_sizes(plan))
    assert allocated.most <= max(unit_sizes(plan).values())


@pytest.mark.parametrize("limit", [1, 50_000, 200_000])
@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("assembled", [False, True])
def test_memory_above_the_model_is_a_bucket_and_a_unit(
    plan: Plan, chunks: list[torch.nn.Module], limit: int, lend: bool, assembled: bool
) -> None:
    with Allocated([*inventory(chunks).values()]) as allocated:
        stream = export(plan, 0, chunks)
        for bucket in buckets(stream if assembled else iter(stream), limit, lend=lend):
            bucket.expire() if not lend else None
            del bucket
    largest = max(unit_sizes(plan).values())
    assert limit <= allocated.most <= max(limit, largest) + largest


def test_what_is_kept_of_a_plan_holds_no_weights(plan: Plan) -> None:
    """Neither changed in place, nor replaced, nor made another kind of tensor between two exports."""
    made = holder(plan.shard_map, 0)
    lender = Lender(2)

    def exported() -> dict[str, float]:
        sums: dict[str, float] = {}
        for bucket in buckets(export(plan, 0, made), 100_000, lend=lender):
            sums |= {name: float(tensor.double().sum()) for name, tensor in bucket.tensors()}
        return sums

    before = exported()
    norm = made[0].decoder.final_layernorm  # type: ignore[union-attr]
    for weight in (norm.weight * 2, torch.arange(48.0)[::2], torch.nn.Parameter(norm.weight * 3)):
        norm.weight = torch.nn.Parameter(weight.detach())
        assert exported() == before | {"model.norm.weight": float(weight.detach().double().sum())}
    norm.weight.data.fill_(5)
    assert exported() == before | {"model.norm.weight": 5.0 * 24}


def test_a_lender_with_two_halves_lends_for_one_bucket_more(whole: dict[str, torch.Tensor]) -> None:
    cut = buckets(whole.items(), 50_000, lend=Lender(2))
    first = next(cut)
    held = next(tensor for _, tensor in first.tensors())
    value, second = held.clone(), next(cut)
    assert torch.equal(held, value)
    assert second.memory().data_ptr() != first.memory().data_ptr()
    with pytest.raises(BucketError, match=r"bucket 0, .* are held when the next"):
        next(cut)


def _where(keep: Callable[[Bucket], Any], assembled: bool = True) -> tuple[list[int], list[Any]]:
    """The address of each own bucket, and what is kept of it."""
    plan = Plan(ShardMap(model("glm4_moe", num_hidden_layers=6), Layout()))
    stream = export(plan, 0, holder(plan.shard_map, 0))
    places, kept = [], []
    for bucket in buckets(stream if assembled else iter(stream), 300_000):
        places.append(bucket.memory().data_ptr())
        kept.append(keep(bucket))
    return places, kept


@pytest.mark.parametrize("assembled", [False, True])
def test_own_memory_is_given_again_once_it_is_dropped(assembled: bool) -> None:
    """The loop has a bucket while the next is made, so that there are two in turn."""
    places, _ = _where(lambda bucket: None, assembled)
    assert len(places) > 4
    assert len(set(places)) == 2


@pytest.mark.parametrize(
    "keep",
    [
        lambda bucket: bucket,
        lambda bucket: dict(bucket.tensors()),
        lambda bucket: bucket.memory()[-1:],
        lambda bucket: bucket.memory().numpy(),
        lambda bucket: memoryview(bucket.memory().numpy()),
        lambda bucket: bucket.memory().untyped_storage(),
        lambda bucket: torch.from_dlpack(bucket.memory()),
        lambda bucket: next(tensor for _, tensor in bucket.tensors()).T,
    ],
    ids=["bucket", "tensors", "slice", "numpy", "memoryview", "storage", "dlpack", "view of a view"],
)
def test_own_memory_that_anything_holds_is_not_given_again(keep: Callable[[Bucket], Any]) -> None:
    places, kept = _where(keep)
    assert len(set(places)) == len(places) == len(kept)


def test_a_lender_keeps_its_memory(plan: Plan, chunks: list[torch.nn.Module]) -> None:
    lender = Lender()
    places = [
        {bucket.memory().data_ptr() for bucket in buckets(export(plan, 0, chunks), 1 << 24, lend=lender)}
        for _ in range(3)
    ]
    assert places[0] == places[1] == places[2]
    with pytest.raises(ValueError, match="halves=0"):
        Lender(0)


def test_a_begun_stream_is_cut_as_any_other(
    plan: Plan, chunks: list[torch.nn.Module], whole: dict[str, torch.Tensor]
) -> None:
    stream = export(plan, 0, chunks)
    first, _ = next(stream)
    names = [name for bucket in buckets(stream, 50_000) for name, _ in bucket.tensors()]
    assert [first.name, *names] == list(whole)


def test_own_buckets_stay(whole: dict[str, torch.Tensor]) -> None:
    kept = dict(pair for bucket in list(buckets(whole.items(), 50_000)) for pair in bucket.tensors())
    assert all(torch.equal(kept[name], tensor) for name, tensor in whole.items())


def test_an_export_is_assembled_in_the_bucket(plan: Plan, chunks: list[torch.nn.Module]) -> None:
    stream = export(plan, 0, chunks)
    cut = buckets(stream, 1 << 24, lend=True)
    bucket = next(cut)
    places = {entry.name: bucket.memory().data_ptr() + entry.offset for entry in bucket.entries}
    again = export(plan, 0, chunks)
    again.place = lambda tensor, device: dict(bucket.tensors())[tensor.name]
    assert {tensor.name: full.data_ptr() for tensor, full in again if full is not None} == places


def test_lent_memory_that_is_held_raises(whole: dict[str, torch.Tensor]) -> None:
    cut = buckets(whole.items(), 50_000, lend=True)
    first = next(cut)
    held = next(tensor for _, tensor in first.tensors())[:1]
    with pytest.raises(BucketError, match=r"bucket 0, model.embed_tokens.weight to .* are held when the next"):
        next(cut)
    del held


def test_a_lent_bucket_ends_with_the_next(whole: dict[str, torch.Tensor]) -> None:
    cut = buckets(whole.items(), 50_000, lend=True)
    first = next(cut)
    memory = first.memory().data_ptr()
    second = next(cut)
    assert second.memory().data_ptr() == memory
    with pytest.raises(BucketError, match="bucket 0 was lent until the next"):
        list(first.tensors())


def test_a_unit_that_comes_apart_is_refused() -> None:
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate.weight", "layers.0.self_attn.k_proj.weight"]
    with pytest.raises(BucketError, match=r"k_proj.weight: other tensors came since the last of layers.0.self_attn"):
        list(buckets([(name, torch.ones(2)) for name in names], 1000))


@pytest.mark.parametrize("limit", [1, 700, 1200, 2000, 10_000])
def test_a_norm_amid_a_unit_comes_after_it(limit: int) -> None:
    """Megatron's order, in which bridges export: the norm before a linear is a parameter of that linear."""
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in IN_MEGATRONS_ORDER]
    memory = torch.empty(8)  # one for all, as a bridge may lend it
    held = list(buckets(((name, memory.fill_(n)) for n, name in enumerate(names)), limit))
    assert all(bucket.message().numel() <= limit or len(units(bucket)) == 1 for bucket in held)
    found = {name: tensor for bucket in held for name, tensor in bucket.tensors()}
    assert list(found)[:6] == [names[n] for n in (0, 2, 3, 4, 1, 5)]
    assert {name: float(tensor[0]) for name, tensor in found.items()} == {name: n for n, name in enumerate(names)}


def test_ranks_without_tensors_have_no_buckets() -> None:
    assert list(buckets([("norm.weight", None)], 1000)) == []


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
def test_units_of_an_export_are_whole(family: str, expert_format: str) -> None:
    names = [t.name for t in Plan(ShardMap(model(family), Layout()).in_format(expert_format)).tensors]  # type: ignore[arg-type]
    runs = [unit_of(name) for i, name in enumerate(names) if i == 0 or unit_of(name) != unit_of(names[i - 1])]
    assert len(runs) == len(set(runs))
    of_layer = [unit_of(name) for name in names if ".layers.1." in name]
    assert any(unit.endswith((".experts", ".mlp")) for unit in of_layer)
    assert any(unit.endswith("attn") for unit in of_layer)


def test_a_folder_is_a_stream(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Also one of several files, as published: the experts of a layer are in more than one."""
    for number in range(3):
        save_file({name: whole[name] for name in list(whole)[number::3]}, tmp_path / f"model-{number}.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        kept = dict(pair for bucket in buckets(checkpoint.tensors(), 50_000) for pair in bucket.tensors())
    assert kept.keys() == whole.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in whole.items())


def test_values_of_all_kinds_arrive() -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40])
    tensors = {"a": odd, "b": odd.bfloat16(), "c": torch.tensor(3), "d": torch.zeros(0, 4), "ü\n": odd.double()[::2]}
    (bucket,) = buckets(tensors.items(), 10_000)
    got = dict(read(bucket.message().clone()).tensors())
    for name, tensor in tensors.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def message() -> torch.Tensor:
    (bucket,) = buckets([("a.weight", torch.arange(6.0)), ("b.weight", torch.arange(3))], 10_000)
    return bucket.message(generation=7).clone()


def test_a_stale_message_is_refused() -> None:
    assert [name for name, _ in read(message(), generation=7).tensors()] == ["a.weight", "b.weight"]
    with pytest.raises(BucketError, match="generation 7, expected 8: a stale read"):
        read(message(), generation=8)


def test_every_changed_byte_is_refused() -> None:
    good = message()
    for at in range(good.numel()):
        torn = good.clone()
        torn[at] ^= 1
        with pytest.raises(BucketError):
            read(torn)


def test_every_cut_message_is_refused() -> None:
    good = message()
    for length in range(good.numel()):
        with pytest.raises(BucketError):
            read(good[:length])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"float32"', b'"float99"', "cannot be read: tensor 'a.weight' of dtype 'float99'"),
        (b'[3],"int64"', b'[9],"int64"', "bucket 0 lists tensors beyond its"),
        (b"[6]", b"[x]", "cannot be read"),
        (b",64]", b",63]", "cannot be read: b.weight"),
        (b'"tensors"', b'"tensorS"', "cannot be read: 'tensors'"),
    ],
)
def test_metadata_of_no_bucket_are_refused(old: bytes, new: bytes, why: str) -> None:
    """Also where the checksum fits."""
    raw = message().numpy().tobytes()[:-16].replace(old, new)
    signed = raw + xxhash.xxh3_64_digest(raw) + MAGIC
    with pytest.raises(BucketError, match=why):
        read(torch.frombuffer(bytearray(signed), dtype=torch.uint8))
