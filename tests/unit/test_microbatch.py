"""Microbatches of routes: packed and batched samples and the parts of ranks, against their inverses and plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.dispatcher.padding import Factor, PaddingError, Plan, plan
from moeref.layout import Layout, LayoutError
from moeref.replay import (
    PAD,
    RouteError,
    Routes,
    Spec,
    Trace,
    batched,
    from_engine,
    gather_ranks,
    join_turns,
    packed,
    rank_rows,
    routes,
    shard_to_rank,
    stage_layers,
    targets,
    write,
)
from tests.unit.routes import random_routes

batches = st.lists(st.tuples(st.integers(1, 21), st.integers(0, 9)), min_size=1, max_size=4).map(
    lambda sizes: [random_routes(n, seed=i, start=start) for i, (n, start) in enumerate(sizes)]
)


@given(samples=batches, multiple=st.sampled_from([1, 2, 4, 6]))
def test_packing_and_back(samples: list[Routes], multiple: int) -> None:
    batch = packed(samples, Plan((Factor(multiple, "sample", "test"),)))
    assert all(n % multiple == 0 for n in batch.cu_seqlens)
    assert len(batch.cu_seqlens) == len(samples) + 1
    for found, sample in zip(batch.samples(), samples, strict=True):
        assert found.equals(sample)
    pads = batch.routes.idx_TLK[batch.routes.kind_T == PAD]
    counts = np.bincount(pads[:, 0].reshape(-1), minlength=11)
    assert counts.max(initial=0) <= counts.min(initial=len(pads) * 3) + 1


@given(
    samples=batches,
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2]),
    rule=st.sampled_from(["zigzag", "contiguous"]),
)
def test_ranks_and_back(samples: list[Routes], cp: int, tp: int, rule: str) -> None:
    layout = Layout(tp=tp, cp=cp)
    batch = packed(samples, plan(layout))
    parts = {}
    for rank in range(layout.world):
        at = layout.coords(rank)
        parts[at.cp, at.tp] = shard_to_rank(batch, layout, rank, rule=rule)  # type: ignore[arg-type]
    whole = gather_ranks(parts, batch.cu_seqlens, layout, rule=rule)  # type: ignore[arg-type]
    assert whole.equals(batch.routes)


def test_parts_of_other_ranks_are_refused() -> None:
    layout = Layout(tp=2)
    batch = packed([random_routes(4)])
    parts = {(0, tp): shard_to_rank(batch, layout, tp) for tp in range(2)}
    with pytest.raises(RouteError, match=r"parts of ranks \(cp, tp\) \[\(0, 0\)\], expected"):
        gather_ranks({(0, 0): parts[0, 0]}, batch.cu_seqlens, layout)
    with pytest.raises(RouteError, match=r"rank \(cp, tp\) \(0, 1\) has 4 rows, expected 2"):
        gather_ranks(parts | {(0, 1): batch.routes}, batch.cu_seqlens, layout)


def test_a_packed_batch_by_hand() -> None:
    # Samples of 8 and 4 tokens, CP 2 zigzag: rank 0 has chunks 0 and 3 of each, then TP 2 halves what it has.
    assert rank_rows((0, 8, 12), cp=2, cp_rank=0).tolist() == [0, 1, 6, 7, 8, 11]
    assert rank_rows((0, 8, 12), cp=2, cp_rank=1).tolist() == [2, 3, 4, 5, 9, 10]
    assert rank_rows((0, 8, 12), cp=2, cp_rank=1, tp=2, tp_rank=1).tolist() == [5, 9, 10]
    assert rank_rows((0, 8, 12), cp=2, cp_rank=1, rule="contiguous").tolist() == [4, 5, 6, 7, 10, 11]
    with pytest.raises(LayoutError, match="not divisible by 2·cp"):
        rank_rows((0, 6), cp=2)


def test_a_batch_whose_ends_are_not_those_of_its_rows_is_refused() -> None:
    batch = packed([random_routes(4), random_routes(2)])
    with pytest.raises(RouteError, match="cu_seqlens end at 6, but there are 3"):
        replace(batch, routes=batch.routes.take(slice(3)))
    for ends in ((), (1, 4, 6), (0, 6), (0, 7, 6), (0, 4, 5, 6)):
        with pytest.raises(RouteError, match=r"of 2 samples; expected 0 and the end of each"):
            replace(batch, cu_seqlens=ends)


PLANS = (None, plan(Layout(tp=2, cp=2)), plan(Layout(tp=2), recipe="delayed"), plan(Layout(cp=2), fixed=128))


@given(samples=batches, padding=st.sampled_from(PLANS), side=st.sampled_from(["left", "right"]))
def test_batching_and_back(samples: list[Routes], padding: Plan | None, side: str) -> None:
    batch = batched(samples, padding, side=side)  # type: ignore[arg-type]
    longest = max(sample.tokens for sample in samples)
    size = padding.padded(longest) if padding else longest
    assert batch.cu_seqlens == (0, size)
    for found, sample in zip(batch.samples(), samples, strict=True):
        assert found.equals(sample)
    idx_SBLK = batch.routes.idx_TLK.reshape(size, len(samples), *samples[0].idx_TLK.shape[1:])
    for column, sample in enumerate(samples):
        first = size - sample.tokens if side == "left" else 0
        for token in range(sample.tokens):
            assert (idx_SBLK[first + token, column] == sample.idx_TLK[token]).all()
    assert (batch.routes.kind_T == PAD).sum() == size * len(samples) - sum(s.tokens for s in samples)


@given(samples=batches, padding=st.sampled_from(PLANS))
def test_a_packed_batch_has_the_lengths_of_its_plan(samples: list[Routes], padding: Plan | None) -> None:
    batch, lengths = packed(samples, padding), [s.tokens for s in samples]
    fit = (padding or Plan(())).pack(lengths)
    sizes = np.diff(batch.cu_seqlens).tolist()
    assert sizes[:-1] == list(fit.samples[:-1])  # what fills up the sequence belongs to the last sample
    assert sizes[-1] >= fit.samples[-1]
    assert batch.routes.tokens == fit.total
    for found, sample in zip(batch.samples(), samples, strict=True):
        assert found.equals(sample)


@given(samples=batches, cp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2]))
def test_ranks_of_a_batch_and_back(samples: list[Routes], cp: int, tp: int) -> None:
    """Every rank holds its tokens of all samples, next to each other as in [S, B]."""
    layout = Layout(tp=tp, cp=cp)
    batch = batched(samples, plan(layout))
    idx_SBLK = batch.routes.idx_TLK.reshape(-1, len(samples), *samples[0].idx_TLK.shape[1:])
    parts = {}
    for rank in range(layout.world):
        at = layout.coords(rank)
        mine = parts[at.cp, at.tp] = shard_to_rank(batch, layout, rank)
        held = rank_rows(batch.cu_seqlens, cp=cp, cp_rank=at.cp, tp=tp, tp_rank=at.tp)
        assert mine.batch == len(samples)
        assert (mine.idx_TLK.reshape(-1, *idx_SBLK.shape[1:]) == idx_SBLK[held]).all()
    assert gather_ranks(parts, batch.cu_seqlens, layout).equals(batch.routes)


def test_a_total_that_the_plan_of_a_group_asks_for() -> None:
    padding = plan(Layout(tp=2), dispatcher="allgather")
    lengths = padding.group((6, 9))
    batch = packed([random_routes(6)], padding, total=lengths[0])
    assert batch.cu_seqlens == (0, 10)
    for total in (4, 11):
        with pytest.raises(RouteError, match=f"total={total}: the plan pads these samples to 6 rows"):
            packed([random_routes(6)], padding, total=total)


def test_samples_that_make_no_microbatch_are_refused() -> None:
    sample = random_routes(4)
    both = batched([sample, sample])
    for make in (packed, batched):
        with pytest.raises(RouteError, match="no samples"):
            make([])
        with pytest.raises(RouteError, match="sample 1 has the rows of 2 samples in turn"):
            make([sample, both.routes])
    for call in (shard_to_rank, targets):
        with pytest.raises(RouteError, match=r"give packed\(\[...\]\) or batched"):
            call(random_routes(4), Layout(), 0)  # type: ignore[arg-type]
    with pytest.raises(RouteError, match="a sample of 4 rows does not fit length=3"):
        batched([sample], length=3)
    with pytest.raises(PaddingError, match="exceeds the fixed length"):
        batched([sample], plan(Layout(), fixed=3))


def test_rows_of_a_batch_are_not_taken_for_those_of_a_sample() -> None:
    both = batched([random_routes(4), random_routes(4, seed=1)]).routes
    assert not both.equals(replace(both, batch=1))
    with pytest.raises(RouteError, match="part 1 has rows of 2 samples in turn, the first of 1"):
        join_turns(random_routes(8), replace(both, start=8))
    with pytest.raises(RouteError, match="rows of 2 samples in turn; write each sample"):
        write(both)


@pytest.mark.parametrize("layout", [Layout(tp=2, cp=2, pp=2), Layout(pp=2, vpp=2), Layout(tp=2, pp=4)])
def test_targets_are_the_rows_and_layers_of_each_rank(layout: Layout) -> None:
    """Tokens named by their experts: where a rank's router sees token 3 of sample 1 in layer 4, the target says so."""
    spec = Spec((False, True, True, False, True, True, True, True), experts=200, top_k=2)
    lengths = (5, 8)
    samples = []
    for sample, length in enumerate(lengths):
        tag_TL = np.add.outer(100 * sample + 10 * np.arange(length), np.asarray(spec.layers)) % 199
        samples.append(routes(np.stack([tag_TL, tag_TL + 1], axis=2), layers=spec.layers, experts=200))
    for batch in (packed(samples, plan(layout)), batched(samples, plan(layout))):
        for rank in range(layout.world):
            at = layout.coords(rank)
            found = targets(batch, layout, rank, spec)
            positions = rank_rows(batch.cu_seqlens, cp=layout.cp, cp_rank=at.cp, tp=layout.tp, tp_rank=at.tp)
            rows = [s * batch.routes.batch + b for s in positions for b in range(batch.routes.batch)]
            assert len(found) == layout.vpp
            for vp, by_layer in enumerate(found):
                assert tuple(by_layer) == stage_layers(layout, spec.moe_layers, at.pp, vp)
                for layer, target_TK in by_layer.items():
                    assert target_TK.dtype == np.int32
                    want = batch.routes.idx_TLK[rows, spec.layers.index(layer)]
                    assert target_TK.tolist() == want.tolist()


def test_targets_say_where_a_route_is_missing() -> None:
    made = routes([[[0, 1], [2, 3]], [[0, 1], [-1, -1]], [[-1, -1], [-1, -1]]], layers=[1, 2], experts=4)
    (by_layer,) = targets(packed([made]), Layout(), 0, Spec((False, True, True), 4, 2))
    assert by_layer[1].tolist() == [[0, 1], [0, 1], [-1, -1]]
    assert by_layer[2].tolist() == [[2, 3], [-1, -1], [-1, -1]]


def test_routes_that_a_spec_read_know_the_stages() -> None:
    spec = Spec((False, True, True, False, True, False), 11, 3)
    sent = np.zeros((4, 6, 3), np.uint8)
    sent[:, list(spec.layers)] = random_routes(4).idx_TLK
    trace = Trace(spec)
    trace.add(sent, 5)
    for made in (from_engine(sent, spec), from_engine(write(random_routes(4)), spec), trace.finish(5, [1] * 5)[0]):
        for batch in (packed([made]), batched([made, made])):
            for layout in (Layout(pp=2), Layout(pp=3), Layout(pp=3, vpp=2)):
                for rank in range(layout.world):
                    given, known = targets(batch, layout, rank, spec), targets(batch, layout, rank)
                    assert [list(chunk) for chunk in known] == [list(chunk) for chunk in given]
    with pytest.raises(RouteError, match="unknown number of decoder layers"):
        targets(packed([random_routes(4)]), Layout(pp=2), 0)
