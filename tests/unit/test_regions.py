"""A layout transform only moves elements: tag each with its identity, shard it, and look where it came out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from moeref import families
from moeref.bridge import BridgeError, padded_vocab, shard_regions
from moeref.bridge.regions import CopyRegion, bounding, relative
from tests.unit.models import CONFIGS, model

pytestmark = pytest.mark.cpu
MAPPINGS = [(name, i) for name in CONFIGS for i in range(len(families.mappings(model(name))))]


def _tagged(row: families.ParamMapping, m: families.Model) -> list[np.ndarray]:
    """Full HF tensors whose elements are numbered 1… without repetition."""
    out, start = [], 1
    for tensor in row.hf:
        shape = [m.dims[d] for d in tensor.dims]
        out.append(np.arange(start, start + np.prod(shape)).reshape(shape))
        start += int(np.prod(shape))
    return out


def transposed(part: np.ndarray, region: CopyRegion) -> np.ndarray:
    return part.T if region.transposed else part


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "index"), MAPPINGS)
def test_shards_and_tensors_share_every_element_once(name: str, index: int, parts: int) -> None:
    m = model(name)
    row = families.mappings(m)[index]
    padded = padded_vocab(m, parts, 128)
    full = _tagged(row, m)
    back = [np.zeros_like(t) for t in full]
    seen: list[int] = []
    together = "{expert}" in row.megatron and "{expert}" not in row.hf[0].name
    for expert, rank in itertools.product(range(m.experts) if together else (None,), range(parts)):
        shape, regions = shard_regions(m, row, rank, parts, padded=padded, expert=expert)
        shard = np.zeros(shape, dtype=int)
        for region in regions:
            assert not shard[region.shard_index].any(), "two regions write the same place"
            assert all(0 <= i.start < i.stop <= n for i, n in zip(region.shard_index, shape, strict=True))  # type: ignore[union-attr]
            shard[region.shard_index] = transposed(full[region.tensor][region.hf_index], region)
        assert row.sharding == "vocab" or shard.all(), "a place of the shard is left unset"
        seen += shard[shard > 0].tolist()
        for region in regions:
            back[region.tensor][region.hf_index] = transposed(shard[region.shard_index], region)
        for source in {r.tensor for r in regions}:
            base = bounding(regions, source)
            piece = full[source][base]
            for region in (r for r in regions if r.tensor == source):
                assert np.array_equal(piece[relative(region.hf_index, base)], full[source][region.hf_index])
    assert all(np.array_equal(a, b) for a, b in zip(full, back, strict=True))
    copies = parts if row.sharding == "replicate" else 1
    assert sorted(seen) == sorted(list(range(1, 1 + sum(t.size for t in full))) * copies)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_fused_experts_hold_what_the_separate_ones_hold(name: str, parts: int) -> None:
    m = model(name)
    for row in (r for r in families.mappings(m) if r.fused and "{expert}" in r.megatron):
        separate = _tagged(row, m)
        fused = np.zeros([m.dims[d] for d in row.fused.dims], dtype=int)  # type: ignore[union-attr]
        fused[5] = np.concatenate(separate) if len(separate) == 2 else separate[0]
        for rank in range(parts):
            shape, apart = shard_regions(m, row, rank, parts, padded=0, expert=5)
            fused_shape, together = shard_regions(m, row, rank, parts, padded=0, expert=5, fused=True)
            assert shape == fused_shape
            a, b = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
            for region in apart:
                a[region.shard_index] = separate[region.tensor][region.hf_index]
            for region in together:
                b[region.shard_index] = fused[region.hf_index]
            assert np.array_equal(a, b)
            assert a.all()
            base = bounding(together, 0)
            assert base[0] == 5
            for region in together:
                assert np.array_equal(fused[base][relative(region.hf_index, base)], fused[region.hf_index])


def test_qkv_groups_are_contiguous_and_interleaved() -> None:
    """Group g is [its q heads | k | v]; TP rank r has groups r·G/TP …"""
    m = model("qwen3_moe")
    row = next(r for r in families.mappings(m) if r.sharding == "qkv")
    q, k, v = _tagged(row, m)
    expected = []
    for group in range(4, 8):
        for head in (2 * group, 2 * group + 1):
            expected += list(q[head * 6 : head * 6 + 6])
        expected += [*k[group * 6 : group * 6 + 6], *v[group * 6 : group * 6 + 6]]
    shape, regions = shard_regions(m, row, 1, 2, padded=0)
    shard = np.zeros(shape, dtype=int)
    for region in regions:
        shard[region.shard_index] = (q, k, v)[region.tensor][region.hf_index]
    assert np.array_equal(shard, np.array(expected))


def _shard(m: families.Model, sharding: str, rank: int, parts: int) -> tuple[np.ndarray, list[np.ndarray]]:
    row = next(r for r in families.mappings(m) if r.sharding == sharding)
    full = _tagged(row, m)
    shape, regions = shard_regions(m, row, rank, parts, padded=0)
    shard = np.zeros(shape, dtype=int)
    for region in regions:
        shard[region.shard_index] = full[region.tensor][region.hf_index]
        assert shard[region.shard_index].size
    return shard, full


def test_gated_queries() -> None:
    """Files have [q | gate] per head; Megatron per KV group its q heads, their gates, k, v."""
    shard, (q, k, v) = _shard(model("qwen3_next"), "gated_qkv", 1, 2)
    q = q.reshape(8, 2, 2, 6, 24).swapaxes(1, 2).reshape(8, 24, 24)
    groups = [np.concatenate([q[g], k[g * 6 : g * 6 + 6], v[g * 6 : g * 6 + 6]]) for g in range(4, 8)]
    assert np.array_equal(shard, np.concatenate(groups))


@pytest.mark.parametrize(("name", "sharding"), [("qwen3_moe", "qkv"), ("qwen3_next", "gated_qkv")])
def test_more_ranks_than_groups_cut_them_wherever_their_rows_end(name: str, sharding: str) -> None:
    """megatron-core's linear_qkv is one column-parallel linear: its rows are cut evenly, also inside heads."""
    m = model(name, num_key_value_heads=2)
    (whole, _), ranks = _shard(m, sharding, 0, 1), [_shard(m, sharding, rank, 8)[0] for rank in range(8)]
    assert {len(shard) % m.head_dim for shard in ranks} != {0}
    assert np.array_equal(np.concatenate(ranks), whole)


def test_gated_delta_nets() -> None:
    """Files have [q | k | v | z] and [b | a] per key head, channels as [q | k | v]; Megatron each of them by itself."""
    m = model("qwen3_next")
    shard, (qkvz, ba) = _shard(m, "gdn_in_proj", 1, 2)
    mine = np.split(qkvz.reshape(8, 50, 24)[4:], (5, 10, 30), axis=1) + np.split(ba.reshape(8, 4, 24)[4:], 2, axis=1)
    assert np.array_equal(shard, np.concatenate([part.reshape(-1, 24) for part in mine]))
    channels, (full,) = _shard(m, "gdn_conv1d", 1, 2)
    assert np.array_equal(channels, np.concatenate([full[20:40], full[60:80], full[160:240]]))
    with pytest.raises(BridgeError, match="key heads: 8 does not divide over 3 ranks"):
        _shard(m, "gdn_in_proj", 0, 3)
    with pytest.raises(BridgeError, match=r"^qwen3_next: .*linear_qkv.*: 8 KV groups are neither a .* of 3 ranks$"):
        _shard(m, "gated_qkv", 0, 3)
    row = next(r for r in families.mappings(model("qwen3_moe")) if r.sharding == "qkv")
    with pytest.raises(BridgeError, match=r"^qwen3_moe: .*linear_qkv.weight: gdn_in_proj needs a gated delta net"):
        shard_regions(model("qwen3_moe"), replace(row, sharding="gdn_in_proj"), 0, 1, padded=0)


def test_gpt_oss_pairs_are_parted_and_matrices_turned() -> None:
    """Gate and up are every second output of an expert's [in, out]; Megatron rows are this rank's gate, then its up."""
    m = model("gpt_oss")
    fc1, bias1, fc2, bias2 = (r for r in families.mappings(m) if "{expert}" in r.megatron)
    rng = np.arange(m.moe_ffn // 2, m.moe_ffn)
    for row, expected in (
        (fc1, lambda full: np.concatenate([full[5][:, 2 * rng].T, full[5][:, 2 * rng + 1].T])),
        (bias1, lambda full: np.concatenate([full[5][2 * rng], full[5][2 * rng + 1]])),
        (fc2, lambda full: full[5][rng].T),
        (bias2, lambda full: full[5]),
    ):
        (full,) = _tagged(row, m)
        shape, regions = shard_regions(m, row, 1, 2, padded=0, expert=5)
        shard = np.zeros(shape, dtype=int)
        for region in regions:
            shard[region.shard_index] = transposed(full[region.hf_index], region)
        assert np.array_equal(shard, expected(full))


@pytest.mark.parametrize(
    ("sharding", "parts", "says"),
    [
        ("qkv", 128, "linear_qkv.weight: rows of KV groups: "),
        ("gate_up", 3, "linear_fc1.weight: gate and up rows: "),
        ("row", 5, "linear_proj.weight dim 1: "),
        ("column", 5, "linear_fc1.weight dim 0: "),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sharding: str, parts: int, says: str) -> None:
    m = model("qwen3_moe")
    row = next(
        r
        for r in families.mappings(m)
        if r.sharding == ("gate_up" if sharding == "column" else sharding) and r.where != "dense"
    )
    with pytest.raises(BridgeError, match=rf"^qwen3_moe: .*{says}\d+ does not divide over {parts} ranks$"):
        shard_regions(m, replace(row, sharding=sharding), 0, parts, padded=0)  # type: ignore[arg-type]


def test_padded_vocabulary() -> None:
    m = model("qwen3_moe")
    assert [padded_vocab(m, tp, 128) for tp in (1, 2, 8)] == [256, 256, 1024]
    assert padded_vocab(m, 1, 1) == 131
    row = families.mappings(m)[0]
    sizes = [sum(r.shard_index[0].stop for r in shard_regions(m, row, r, 8, padded=1024)[1]) for r in range(8)]  # type: ignore[union-attr]
    assert sizes == [128, 3, 0, 0, 0, 0, 0, 0]
    assert {shard_regions(m, row, r, 8, padded=1024)[0] for r in range(8)} == {(128, 24)}
    assert shard_regions(m, row, 7, 8, padded=1024)[1] == (), "a rank of padding has nothing to read"
    with pytest.raises(BridgeError, match="padded vocabulary: 256 does not divide over 3 ranks"):
        shard_regions(m, row, 0, 3, padded=256)


def test_aliases_lie_where_their_tensor_does() -> None:
    m = model("deepseek_v3", num_nextn_predict_layers=2)
    for row in (r for r in families.mappings(m) if r.alias):
        assert len(row.hf) == 3
        for rank in range(2):
            _, regions = shard_regions(m, row, rank, 2, padded=256)
            assert [r.tensor for r in regions] == [0, 1, 2]
            assert len({(r.hf_index[0].start, r.shard_index[0].start) for r in regions}) == 1  # type: ignore[union-attr]


def test_pairwise_distinct_sizes() -> None:
    for name, tied in itertools.product(CONFIGS, (False, True)):
        m = model(name, tie_word_embeddings=tied)
        used = {d for row in families.mappings(m) for t in (*row.hf, row.fused) if t is not None for d in t.dims}
        dims = {d: m.dims[d] for d in used - {"moe_ffn", "shared_ffn", "2hidden"}}
        sizes = [size for size in dims.values() if size]
        assert len(set(sizes)) == len(sizes), dims
