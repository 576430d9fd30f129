"""Comparison is bitwise; every diagnosis is made from a fault built here by hand."""

from __future__ import annotations

import pytest
import torch
from moeref_conformance.diagnosis.compare import compare, same
from moeref_conformance.diagnosis.diagnose import diagnose
from moeref_conformance.diagnosis.matching import Candidates, relation

pytestmark = pytest.mark.cpu
ATTENTION = "model.layers.3.self_attn."
EXPERT = "model.layers.3.mlp.experts.5."
GATE, UP, DOWN = (f"{EXPERT}{x}_proj.weight" for x in ("gate", "up", "down"))
Q, K, V = (f"{ATTENTION}{x}_proj.weight" for x in "qkv")


def _checkpoint() -> dict[str, torch.Tensor]:
    """Four layers, the first dense, eight experts: 12 rows × 10 columns, 4 KV groups of 2 query heads, 3 wide."""
    g = torch.Generator().manual_seed(7)
    made = {"model.embed_tokens.weight": torch.randn(21, 10, generator=g)}
    for layer in range(5):
        at = f"model.layers.{layer}."
        made[f"{at}input_layernorm.weight"] = torch.randn(10, generator=g)
        for x, rows in (("q", 24), ("k", 12), ("v", 12)):
            made[f"{at}self_attn.{x}_proj.weight"] = torch.randn(rows, 10, generator=g)
        made[f"{at}self_attn.o_proj.weight"] = torch.randn(10, 24, generator=g)
        for expert in range(8):
            for x, size in (("gate", (16, 10)), ("up", (16, 10)), ("down", (10, 16))):
                made[f"{at}mlp.experts.{expert}.{x}_proj.weight"] = torch.randn(size, generator=g)
    return made


CHECKPOINT = _checkpoint()
CANDIDATES = Candidates(CHECKPOINT, dense_prefix=1)


def say(name: str, got: torch.Tensor, stale: torch.Tensor | None = None) -> str:
    return diagnose(name, CHECKPOINT[name], got, CANDIDATES, stale)


def test_equal_tensors_have_no_difference() -> None:
    nan = torch.tensor([float("nan"), 0.0, 1.0])
    assert compare(nan, nan.clone()) is None
    assert same(nan, nan.clone())
    assert compare(torch.empty(0, 3), torch.empty(0, 3)) is None
    assert compare(torch.eye(3).T, torch.eye(3)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_first_difference(dtype: torch.dtype) -> None:
    want = torch.arange(24).reshape(2, 3, 4).to(dtype)
    got = want.clone()
    got[1, 0, 2] = 99
    got[1, 2, 3] = 98
    found = compare(want, got)
    assert found is not None
    assert (found.kind, found.flat, found.index, found.count, found.total) == ("bytes", 14, (1, 0, 2), 2, 24)
    assert found.text == "2 of 24 elements differ, first at [1, 0, 2]"


def test_bits_count() -> None:
    found = compare(torch.tensor([0.0, 0.15625]), torch.tensor([-0.0, 0.15625]))
    assert found is not None
    assert (found.expected, found.got) == ("0.0 (0x00000000)", "-0.0 (0x80000000)")
    found = compare(torch.tensor([1.0]), torch.tensor([float("nan")]))
    assert found is not None
    assert found.got == "nan (0x7fc00000)"


def test_shape_dtype_and_padding() -> None:
    shape, dtype = compare(torch.ones(2, 3), torch.ones(3, 2)), compare(torch.ones(2), torch.ones(2).half())
    assert shape is not None
    assert shape.text == "shape is [3, 2], expected [2, 3]"
    assert dtype is not None
    assert dtype.text == "dtype is float16, expected float32"
    padded = torch.tensor([[1.0], [2.0], [7.0]])
    assert compare(torch.tensor([[1.0], [2.0], [0.0]]), padded, rows=2) is None
    assert compare(torch.tensor([[1.0], [3.0], [0.0]]), padded, rows=2) is not None


def test_all_zero_and_nan() -> None:
    assert say(GATE, torch.zeros(16, 10)) == "all zero"
    assert say(GATE, torch.full((16, 10), float("nan"))) == "all NaN"
    got = CHECKPOINT[GATE].clone()
    got[2] = float("nan")
    assert say(GATE, got) == "10 of 160 elements are NaN"


def test_transposed() -> None:
    square = torch.randn(6, 6)
    assert diagnose("x", square, square.T, Candidates({"x": square})) == "equals its transpose"
    assert say(GATE, CHECKPOINT[GATE].T) == "equals its transpose"
    assert say(GATE, CHECKPOINT[GATE].reshape(10, 16)) == "the right elements in another shape"
    stack = torch.randn(4, 6, 10)
    turned = "equals its transpose (last two dimensions swapped)"
    assert diagnose("x", stack, stack.transpose(1, 2), Candidates({"x": stack})) == turned


def test_strided_tensor_read_flat() -> None:
    want = CHECKPOINT[GATE]
    said = "its elements are in the storage order of its transpose: a strided tensor was read flat"
    assert say(GATE, want.t().contiguous().view(-1).view(want.shape)) == said
    shards = [x.t().contiguous().view(-1).view(x.shape) for x in want.chunk(2)]
    assert say(GATE, torch.cat(shards)).startswith("the elements of each of 2 shards of dim 0 are in the storage order")


@pytest.mark.parametrize(("cut", "join", "size"), [(1, 0, 2), (0, 1, 4)])
def test_shards_joined_along_another_axis(cut: int, join: int, size: int) -> None:
    got = torch.cat(CHECKPOINT[GATE].chunk(size, cut), join)
    assert say(GATE, got) == f"{size} TP or ETP shards of dim {cut} concatenated on dim {join}"


def test_shards_in_another_order() -> None:
    first, second = CHECKPOINT[DOWN].chunk(2, 1)
    assert say(DOWN, torch.cat([second, first], 1)) == "TP or ETP shards of dim 1 in the order 1, 0"
    assert say(DOWN, torch.cat([second, second], 1)) == "TP or ETP shards of dim 1 are 1, 1"


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        (DOWN, "model.layers.3.mlp.experts.7.down_proj.weight", "holds expert 7, expected expert 5"),
        (DOWN, "model.layers.1.mlp.experts.5.down_proj.weight", "is layer -2"),
        (DOWN, "model.layers.4.mlp.experts.5.down_proj.weight", "is layer +1 = dense prefix"),
        (DOWN, "model.layers.1.mlp.experts.2.down_proj.weight", "holds expert 2 of layer -2, expected expert 5"),
        (GATE, UP, "gate and up swapped"),
        (UP, GATE, "gate and up swapped"),
        (K, V, "is v_proj of the same layer"),
        (K, "model.layers.1.self_attn.v_proj.weight", "is model.layers.1.self_attn.v_proj.weight"),
    ],
)
def test_is_another_tensor(name: str, other: str, said: str) -> None:
    assert say(name, CHECKPOINT[other].clone()) == said


def test_relation_of_local_names() -> None:
    fc1 = "decoder.layers.2.mlp.experts.{}.linear_fc1.weight"
    assert relation(fc1.format(1), fc1.format(3)) == "expert 3"
    assert relation(fc1.format(1), fc1.format(1).replace("fc1", "fc2")) == "linear_fc2 of the same expert"
    assert relation("x", "y") == "y of the same layer"


@pytest.mark.parametrize("size", [2, 4])
def test_shards_not_rechunked(size: int) -> None:
    gate, up = CHECKPOINT[GATE].chunk(size), CHECKPOINT[UP].chunk(size)
    joined = torch.cat([x for pair in zip(gate, up, strict=True) for x in pair])
    said = f"TP shards concatenated without re-chunking gate and up (TP={size})"
    assert say(GATE, joined[:16]) == said
    assert say(UP, joined[16:]) == said


def test_halves_swapped() -> None:
    fused = torch.cat([CHECKPOINT[GATE], CHECKPOINT[UP]])
    got = torch.cat([CHECKPOINT[UP], CHECKPOINT[GATE]])
    said = "halves swapped: up before gate"
    assert diagnose("decoder.layers.3.mlp.linear_fc1.weight", fused, got, CANDIDATES) == said


@pytest.mark.parametrize(("index", "name"), enumerate([Q, K, V]))
def test_interleave_of_kv_groups_lost(index: int, name: str) -> None:
    parts = [CHECKPOINT[n].chunk(4) for n in (Q, K, V)]
    fused = torch.cat([part[g] for g in range(4) for part in parts])
    got = (fused[:24], fused[24:36], fused[36:])[index]
    assert say(name, got) == "QKV read as [Q;K;V]: the interleave of 4 KV groups is lost"


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        (slice(8, 16), slice(None), "rows 8–15 are zero: shard 1 of 2 is missing"),
        (slice(None), slice(0, 5), "columns 0–4 are zero: shard 0 of 2 is missing"),
        (slice(3, 4), slice(None), "rows 3 are zero: a shard is missing"),
    ],
)
def test_shard_missing(rows: slice, columns: slice, said: str) -> None:
    got = CHECKPOINT[GATE].clone()
    got[rows, columns] = 0
    assert say(GATE, got) == said


def test_rows_of_another_tensor() -> None:
    got = CHECKPOINT[GATE].clone()
    got[8:] = CHECKPOINT[UP][2:10]
    assert say(GATE, got) == f"rows 8–15 are rows 2–9 of {UP}"
    got[12:] = -0.0
    assert say(GATE, got) == f"rows 8–11 are rows 2–5 of {UP}; rows 12–15 are zero"
    got[12:] = torch.randn(4, 10)
    assert say(GATE, got) == f"rows 8–11 are rows 2–5 of {UP}; rows 12–15 are nowhere in the checkpoint"


def test_columns_of_another_tensor() -> None:
    other = DOWN.replace("experts.5", "experts.6")
    got = CHECKPOINT[DOWN].clone()
    got[:, 8:12] = CHECKPOINT[other][:, :4]
    assert say(DOWN, got) == f"columns 8–11 are columns 0–3 of {other}"


def test_rows_and_columns_permuted() -> None:
    rows = CHECKPOINT[GATE].roll(3, 0)
    assert say(GATE, rows) == (
        "rows permuted within the tensor (rows 0–2 are rows 13–15 of itself; rows 3–15 are rows 0–12 of itself)"
    )
    columns = CHECKPOINT[DOWN][:, torch.arange(16).roll(3)]
    assert say(DOWN, columns).startswith("columns permuted within the tensor (columns 0–2 are columns 13–15 of itself")


def test_rows_copied() -> None:
    got = torch.cat([CHECKPOINT[GATE][:9], CHECKPOINT[GATE][:7]])
    assert say(GATE, got) == "rows 9–15 are rows 0–6 of itself"


def test_padding() -> None:
    name = "model.embed_tokens.weight"
    table = CHECKPOINT[name]
    assert say(name, torch.cat([table, torch.zeros(3, 10)])) == "3 rows of zeros appended (padding not trimmed)"
    assert say(name, torch.cat([table, torch.ones(3, 10)])) == "3 rows appended (padding not trimmed)"
    assert say(name, table[:18]) == "short by 3 rows: only rows 0–17 of 21"
    assert say(GATE, CHECKPOINT[GATE][8:]) == "short by 8 rows: only rows 8–15 of 16"
    assert say(DOWN, CHECKPOINT[DOWN][:, :8]) == "short by 8 columns: only columns 0–7 of 16"


def test_precision() -> None:
    want = CHECKPOINT[GATE]
    assert say(GATE, want.bfloat16().float()) == "bf16-rounded fp32"
    assert say(GATE, want.half().float()) == "fp16-rounded fp32"
    assert say(GATE, want.bfloat16()) == "rounded from float32 to bfloat16"
    assert say(GATE, want.double()) == "the same values as float64 instead of float32"
    assert say(GATE, torch.randn(16, 10).bfloat16()) == "bfloat16 instead of float32, with other values"


def test_stale() -> None:
    old, new = CHECKPOINT[GATE], CHECKPOINT[GATE] * -0.5
    changed = Candidates({n: t * -0.5 for n, t in CHECKPOINT.items()})
    assert diagnose(GATE, new, old.clone(), changed, old) == "stale: the values of before the change"
    half = torch.cat([old[:8], new[8:]])
    assert diagnose(GATE, new, half, changed, old) == "rows 0–7 are stale"


def test_arithmetic() -> None:
    want = CHECKPOINT[GATE]
    assert say(GATE, want * 2) == "is 2 times the expected tensor"
    assert say(GATE, want + 1e-6).startswith("arithmetic, not movement: differs by at most ")
    noisy = want * (1 + 0.05 * torch.randn(16, 10))
    assert say(GATE, noisy) == "arithmetic, not movement: close to the expected values, and no element is equal"


def test_other_scales_of_blocks() -> None:
    want = CHECKPOINT[GATE]
    factors = torch.tensor([[3.0, 0.5], [1.0, 7.0]]).repeat_interleave(8, 0).repeat_interleave(5, 1)
    said = "blocks of it are 0.5 to 7 times the expected ones: their scales"
    assert say(GATE, want * factors) == said
    zeros = want.clone().index_fill(0, torch.tensor([3]), 0.0)
    assert diagnose("other", zeros, zeros * factors, Candidates({})) == said
    assert "scales" not in say(GATE, want * torch.rand(16, 10))
    assert "scales" not in say(GATE, want * -factors)


def test_nothing_of_the_checkpoint() -> None:
    said = "nothing of it is in the checkpoint: an initial value, or memory never written"
    assert say(GATE, torch.randn(16, 10)) == said
    assert say(GATE, torch.randn(16, 12)) == said
    assert say(GATE, torch.ones(16, 10)) == "all elements are 1: an initial value, never loaded"
    shuffled = CHECKPOINT[GATE].reshape(-1)[torch.randperm(160)].reshape(16, 10)
    assert say(GATE, shuffled) == "the expected elements in another order"
    some = CHECKPOINT[GATE].clone()
    some[:, 3:] = torch.randn(16, 7)
    assert say(GATE, some) == "no known pattern"


def test_vectors() -> None:
    name = "model.layers.3.input_layernorm.weight"
    got = CHECKPOINT[name].clone()
    got[5:] = 0
    assert say(name, got) == "elements 5–9 are zero: shard 1 of 2 is missing"
    assert say(name, CHECKPOINT[name.replace(".3.", ".2.")].clone()) == "is layer -1 = dense prefix"
    assert diagnose("s", torch.tensor(1.0), torch.tensor(3.0), CANDIDATES) == "is 3 times the expected tensor"


# What one rank holds: shards, looked for among its own and then in the checkpoint behind them.

FC1, QKV, FC2 = (
    "decoder.layers.3.mlp.experts.5.linear_fc1.weight",
    "decoder.layers.3.self_attention.linear_qkv.weight",
    "decoder.layers.3.mlp.experts.5.linear_fc2.weight",
)
PARTS = {FC1: (GATE, UP), QKV: (Q, K, V), FC2: (DOWN,)}


def fc1(expert: str = "experts.5", rank: int = 0) -> torch.Tensor:
    return torch.cat([CHECKPOINT[n.replace("experts.5", expert)].chunk(2)[rank] for n in (GATE, UP)])


def qkv(rank: int = 0) -> torch.Tensor:
    """Two of the four groups of two query heads, a key head and a value head, each 3 wide."""
    groups = [torch.cat([CHECKPOINT[n].chunk(4)[g] for n in (Q, K, V)]) for g in range(4)]
    return torch.cat(groups[2 * rank : 2 * rank + 2])


def say_of_shard(name: str, got: torch.Tensor) -> str:
    """Rank 0 of TP=2."""
    right = {FC1: fc1(), QKV: qkv(), FC2: CHECKPOINT[DOWN].chunk(2, 1)[0]}
    return diagnose(name, right[name], got, Candidates(right, 1, behind=CANDIDATES, parts=PARTS))


def test_shard_is_a_part_of_one_tensor() -> None:
    said = "TP shard is a contiguous part of cat(gate and up): rows 0–15 of 32"
    assert say_of_shard(FC1, torch.cat([CHECKPOINT[GATE], CHECKPOINT[UP]])[:16]) == said
    said = "TP shard is a contiguous part of cat(q, k and v): rows 24–47 of 48"
    assert say_of_shard(QKV, torch.cat([CHECKPOINT[n] for n in (Q, K, V)])[24:]) == said


def test_shard_of_stacked_q_k_v() -> None:
    got = torch.cat([CHECKPOINT[n].chunk(2)[0] for n in (Q, K, V)])
    assert say_of_shard(QKV, got) == "q, k and v stacked: the interleave of KV groups is lost"


def test_shard_of_another_rank() -> None:
    assert say_of_shard(FC1, fc1(rank=1)) == "is shard 1 of 2 of dim 0: another rank's"
    assert say_of_shard(FC2, CHECKPOINT[DOWN].chunk(2, 1)[1]) == "is shard 1 of 2 of dim 1: another rank's"
    assert say_of_shard(QKV, qkv(rank=1)) == "is shard 1 of 2 of dim 0: another rank's"
    said = "is shard 3 of 4 of dim 1: a cut over 4 ranks instead of 2"
    assert say_of_shard(FC2, CHECKPOINT[DOWN].chunk(4, 1)[3]) == said


def test_shard_of_another_expert() -> None:
    assert say_of_shard(FC1, fc1("experts.2")) == "holds expert 2, expected expert 5"
    other = CHECKPOINT[DOWN.replace("layers.3", "layers.4")].chunk(2, 1)[0]
    assert say_of_shard(FC2, other) == "is layer +1 = dense prefix"


def test_experts_of_a_fused_tensor() -> None:
    name = "model.layers.3.mlp.experts.gate_up_proj"
    want = torch.randn(4, 32, 10)
    moved = want.clone()
    moved[2:] = want[:2]
    inside = Candidates({name: want})
    assert diagnose(name, want, moved, inside) == "2 of 4 experts: expert 2 holds expert 0, expected expert 2"
    shards = torch.cat([x for g, u in zip(want[1].chunk(4)[:2], want[1].chunk(4)[2:], strict=True) for x in (g, u)])
    joined = want.clone()
    joined[1] = shards
    said = "1 of 4 experts: expert 1 TP shards concatenated without re-chunking gate and up (TP=2)"
    assert diagnose(name, want, joined, inside) == said
