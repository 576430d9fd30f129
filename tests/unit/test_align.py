"""Alignment of routes: every step is compared with its inverse, or with a plain loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.layout import Layout
from moeref.replay import (
    GIVEN,
    MISSING,
    PAD,
    RouteError,
    Routes,
    from_tokens,
    join_turns,
    merge_layers,
    missing_rows,
    pad,
    routes,
    select_layers,
    stage_layers,
    to_tokens,
    truncate,
    unpad,
)
from tests.unit.routes import any_routes, random_routes


@given(made=any_routes(least=1), lacks=st.booleans())
def test_rows_to_tokens_and_back(made: Routes, lacks: bool) -> None:
    tokens = made.tokens + lacks
    whole, rule = to_tokens(made, tokens, start=made.start)
    assert whole.tokens == tokens
    assert whole.start == made.start
    assert whole.kind_T.tolist() == [GIVEN] * made.tokens + [MISSING] * lacks
    assert from_tokens(whole, rule).equals(made)


@pytest.mark.parametrize("tokens", [3, 6])
def test_any_other_number_of_rows_is_refused(tokens: int) -> None:
    with pytest.raises(RouteError, match=f"4 rows of routes for {tokens} tokens"):
        to_tokens(random_routes(4), tokens)


def test_rows_after_a_prefix_are_not_taken_for_the_first() -> None:
    made = random_routes(4, start=3)
    with pytest.raises(RouteError, match=r"rows begin at token 3 of their sequence, the tokens at 0; join"):
        to_tokens(made, 4)
    whole, _ = to_tokens(join_turns(missing_rows(3, made), made), 7)
    assert whole.kind_T.tolist() == [MISSING] * 3 + [GIVEN] * 4
    assert np.array_equal(whole.idx_TLK[3:], made.idx_TLK)


@given(made=any_routes(), first=st.integers(0, 45), count=st.integers(0, 45))
def test_truncation_takes_tokens_and_rows_together(made: Routes, first: int, count: int) -> None:
    tokens_T = np.arange(made.tokens) + 100
    kept, left = truncate(made, tokens_T, slice(first, first + count))
    assert kept.tokens == len(left)
    for row, token in enumerate(left):
        assert kept.start + row == made.start + int(token) - 100
        assert np.array_equal(kept.idx_TLK[row], made.idx_TLK[int(token) - 100])


@given(made=any_routes(), cut=st.integers(0, 45))
def test_truncation_and_back(made: Routes, cut: int) -> None:
    kept, cut_off = (truncate(made, np.arange(made.tokens), part)[0] for part in (slice(cut), slice(cut, None)))
    assert join_turns(kept, cut_off).equals(made)


def test_truncation_of_unaligned_routes_is_refused() -> None:
    with pytest.raises(RouteError, match="5 tokens and 4 rows"):
        truncate(random_routes(4), np.arange(5), slice(2))
    with pytest.raises(RouteError, match="not every 2th"):
        truncate(random_routes(4), np.arange(4), slice(0, 4, 2))


@given(made=any_routes(least=2), data=st.data())
def test_a_rollout_in_turns_is_the_rollout_in_one(made: Routes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, made.tokens - 1))
    back = data.draw(st.integers(0, cut))
    earlier, later = made.take(slice(0, cut)), made.take(slice(cut - back, None), start=made.start + cut - back)
    assert join_turns(earlier, later).equals(made)


def test_a_resumed_rollout_keeps_the_routes_of_the_tokens_it_sampled() -> None:
    earlier, recomputed = random_routes(4, seed=1), random_routes(7, seed=2)
    recomputed.versions_T[:] = 8
    whole = join_turns(earlier, recomputed)
    assert np.array_equal(whole.idx_TLK[:4], earlier.idx_TLK)
    assert np.array_equal(whole.idx_TLK[4:], recomputed.idx_TLK[4:])
    assert whole.versions_T.tolist() == [7] * 4 + [8] * 3


def test_the_row_that_the_last_token_lacked_comes_with_the_next_turn() -> None:
    earlier, _ = to_tokens(random_routes(4, seed=1), 5)
    later = random_routes(3, seed=2, start=4)
    whole = join_turns(earlier, later)
    assert whole.tokens == 7
    assert not (whole.kind_T == MISSING).any()
    assert np.array_equal(whole.idx_TLK[4:], later.idx_TLK)


def test_a_gap_between_turns_is_refused() -> None:
    with pytest.raises(RouteError, match="rows end at token 4 and go on at 6; 2 tokens have no row"):
        join_turns(random_routes(4), random_routes(2, start=6))


@pytest.mark.parametrize(("tokens", "start"), [(3, 1), (4, 0), (0, 4), (9, 1)])
def test_rows_that_begin_or_end_before_the_earlier_ones_are_refused(tokens: int, start: int) -> None:
    with pytest.raises(RouteError, match="are not continued by those of"):
        join_turns(random_routes(4, start=2), random_routes(tokens, start=start))


@given(made=any_routes(), left=st.integers(0, 4), right=st.integers(0, 4))
def test_padding_and_back(made: Routes, left: int, right: int) -> None:
    whole = pad(made, left=left, right=right)
    assert whole.kind_T.tolist() == [PAD] * left + [GIVEN] * made.tokens + [PAD] * right
    assert unpad(whole).equals(made)
    assert all(len(set(row)) == made.top_k for layer in whole.idx_TLK.tolist() for row in layer)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(pp=2), Layout(pp=2, vpp=2), Layout(pp=4), Layout(pp=2, vpp=2, pipeline_layout="Et|ttt|tt|ttL")],
)
def test_stages_and_back(layout: Layout) -> None:
    moe = (False, True, True, True, False, True, True, True)
    made = random_routes(5, layers=tuple(i for i, is_moe in enumerate(moe) if is_moe))
    parts = [
        select_layers(made, stage_layers(layout, moe, pp, vp)) for pp in range(layout.pp) for vp in range(layout.vpp)
    ]
    assert merge_layers(parts).equals(made)


def test_stages_go_by_layer_number_under_vpp() -> None:
    moe = (False,) + (True,) * 7
    layout = Layout(pp=2, vpp=2)
    assert [stage_layers(layout, moe, pp, vp) for pp, vp in ((0, 0), (0, 1), (1, 0), (1, 1))] == [
        (1,),
        (4, 5),
        (2, 3),
        (6, 7),
    ]


def test_layers_that_are_not_there_and_layers_that_come_twice_are_refused() -> None:
    made = random_routes(3)
    with pytest.raises(RouteError, match=r"no routes for layers \[3\]"):
        select_layers(made, [1, 3])
    with pytest.raises(RouteError, match=r"layers \[2\] come twice"):
        merge_layers([select_layers(made, [1, 2]), select_layers(made, [2, 4])])
    with pytest.raises(RouteError, match="other rows"):
        merge_layers([select_layers(made, [1]), select_layers(pad(made, right=1), [2])])


def test_routes_of_an_mtp_layer_stay_apart() -> None:
    made = random_routes(3, layers=(1, 2, 8))  # decoder of 8 layers; 8 is its MTP layer
    assert select_layers(made, stage_layers(Layout(), (False, True, True) + (False,) * 5, 0)).layers == (1, 2)
    assert select_layers(made, [8]).layers == (8,)


def test_a_stage_without_moe_layers_adds_nothing() -> None:
    made = random_routes(3)
    none = routes(np.zeros((0, 0, 3), np.int64), layers=[], experts=11)
    assert merge_layers([select_layers(made, []), made]).equals(made)
    assert merge_layers([none, made]).equals(made)
    assert merge_layers([none, none]).equals(none)
    with pytest.raises(RouteError, match="no routes to join"):
        merge_layers([])
