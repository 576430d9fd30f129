"""Traces: rollouts in any cut against the rollout in one; missing rows are refused only where they are trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.replay import MISSING, Coverage, RouteError, Routes, Spec, Trace, write
from tests.unit.routes import random_routes

SPEC = Spec((False, True, True, False, True), experts=11, top_k=3)


def sent(whole: Routes, first: int, last: int) -> np.ndarray[Any, Any]:
    """The rows of tokens first to last as vLLM sends them: all layers, zeros for the dense ones."""
    found = np.zeros((last - first, len(SPEC.moe_layers), SPEC.top_k), np.uint8)
    found[:, list(SPEC.layers)] = whole.idx_TLK[first:last]
    return found


@given(
    turns=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_rollout_in_turns_is_the_rollout_in_one(turns: list[tuple[int, int, bool]], seed: int) -> None:
    """Each turn samples tokens after an observation; some send all rows again, some from prompt_start on."""
    end = sum(made + seen for made, seen, _ in turns)
    whole = random_routes(end, seed=seed)
    trace, at = Trace(SPEC), 0
    for made, seen, again in turns:
        at += made + seen
        start = 0 if again else trace.prompt_start
        recomputed = random_routes(end, seed=seed + 1)  # a resumed engine may choose other experts
        data = np.concatenate([sent(recomputed, start, trace.rows), sent(whole, max(start, trace.rows), at - 1)])
        trace.add(data, at, start=0 if again else None, version=7)
    routes, coverage = trace.finish(end, [1] * end)
    assert routes.idx_TLK[:-1].tolist() == whole.idx_TLK[:-1].tolist()
    assert routes.missing_TL[:-1].sum() == 0
    assert routes.missing_TL[-1].all()
    assert coverage == Coverage(3 * (end - 1), 0, 0, 0)


def test_an_aborted_turn_resumes_where_its_rows_end() -> None:
    whole, trace = random_routes(12), Trace(SPEC)
    trace.add(sent(whole, 0, 6), 7)  # aborted after 7 tokens
    assert trace.prompt_start == 6
    trace.add(sent(whole, 6, 9), 10)
    assert trace.prompt_start == 9
    with pytest.raises(RouteError, match=r"rows of tokens 9 to 20 for a rollout of 12 tokens.*prompt_start=9"):
        trace.add(sent(whole, 0, 11), 12)  # the engine sent all rows
    trace.add(sent(whole, 0, 11), 12, start=0)
    assert trace.rows == 11
    with pytest.raises(RouteError, match="empty routes"):
        trace.add([], 12)
    with pytest.raises(RouteError, match="no routes came"):
        trace.add(None, 12)
    assert trace.finish(12, [1] * 12)[0].idx_TLK[:-1].tolist() == whole.idx_TLK[:-1].tolist()


def test_rows_that_begin_a_token_early_are_not_taken_for_the_next_ones() -> None:
    """An engine that counts from the last row held sends one row twice; their number fits a last token's row too."""
    whole, trace = random_routes(12), Trace(SPEC)
    trace.add(sent(whole, 0, 6), 7)
    with pytest.raises(RouteError, match=r"6 rows for tokens 6 to 11: one too many.*start=5 or start=6"):
        trace.add(sent(whole, 5, 11), 12)
    trace.add(sent(whole, 5, 11), 12, start=5)
    assert trace.finish(12, [1] * 12)[0].idx_TLK[:-1].tolist() == whole.idx_TLK[:-1].tolist()
    with_last = Trace(SPEC)
    with_last.add(sent(whole, 0, 6), 7)
    with_last.add({"data": sent(whole, 6, 12).tobytes(), "shape": [6, 5, 3], "start": 6}, 12)
    assert with_last.finish(12, [1] * 12)[0].idx_TLK.tolist() == whole.idx_TLK.tolist()


def test_a_start_that_is_sent_is_taken() -> None:
    whole, trace = random_routes(8), Trace(SPEC)
    trace.add({"data": sent(whole, 0, 4).tobytes(), "shape": [4, 5, 3]}, 5)
    trace.add({"data": sent(whole, 2, 5).tobytes(), "shape": [3, 5, 3], "start": 2}, 6)
    trace.add(write(whole.take(slice(4, 7), start=4)), 8)
    assert trace.rows == 7
    assert trace.finish(8, [0] + [1] * 7)[0].idx_TLK[:7].tolist() == whole.idx_TLK[:7].tolist()


def test_a_rollout_that_is_taken_back_is_truncated_first() -> None:
    whole, other, trace = random_routes(9), random_routes(9, seed=5), Trace(SPEC)
    trace.add(sent(whole, 0, 8), 9)
    with pytest.raises(RouteError, match="if the rollout was taken back"):
        trace.add(sent(other, 0, 6), 7, start=0)
    with pytest.raises(RouteError, match="8 rows of routes for 5 tokens; truncate the trace"):
        trace.finish(5, [1] * 5)
    trace.truncate(5)
    trace.add(sent(other, 5, 7), 8)
    found = trace.finish(8, [1] * 8)[0].idx_TLK
    assert found[:7].tolist() == [*whole.idx_TLK[:5].tolist(), *other.idx_TLK[5:7].tolist()]


def test_rows_that_are_lacking_are_refused_only_where_they_are_trained_on() -> None:
    whole, trace = random_routes(12), Trace(SPEC)
    trace.add(sent(whole, 0, 5), 6)
    # Tokens 6 to 8 are an observation; 9 to 11 would be trained on.
    routes, coverage = trace.finish(9, [0, 0, 0, 1, 1, 1, 0, 0, 0])
    assert routes.tokens == 9
    assert routes.kind_T.tolist() == [0] * 5 + [MISSING] * 4
    assert coverage == Coverage(trained=9, trained_missing=0, context=15, context_missing=9)
    with pytest.raises(RouteError, match=r"token 8, layer 1: no route, but it predicts token 9, .*trained on; 9 of"):
        trace.finish(12, [0] * 9 + [1] * 3)
    with pytest.raises(RouteError, match=r"loss_mask of shape \[3\] for 12 tokens"):
        trace.finish(12, [0] * 3)


def test_holes_of_the_engine_are_counted_and_bounded() -> None:
    whole, trace = random_routes(11), Trace(SPEC)
    data = sent(whole, 0, 10)
    data[1] = 0  # a row of the prompt
    data[6, 2] = 0  # one layer of a row that is trained on
    trace.add(data, 11)
    mask = [0] * 5 + [1] * 6
    with pytest.raises(RouteError, match=r"token 6, layer 2: no route.*1 of 18 such routes are missing, holes=0.0"):
        trace.finish(11, mask)
    routes, coverage = trace.finish(11, mask, holes=0.06)
    assert coverage == Coverage(trained=18, trained_missing=1, context=12, context_missing=3)
    assert np.argwhere(routes.missing_TL[:10]).tolist() == [[1, 0], [1, 1], [1, 2], [6, 1]]
    trace.add(sent(whole, 1, 10), 11, start=1)  # asked for again: whole rows are filled
    assert trace.finish(11, mask, holes=0.06)[1].context_missing == 0


def test_rows_that_never_came_are_a_hole() -> None:
    whole, trace = random_routes(11), Trace(SPEC)
    trace.add(sent(whole, 0, 3), 4)
    trace.add(sent(whole, 6, 10), 11, start=6)
    assert trace.finish(11, [0] * 7 + [1] * 4)[1].context_missing == 9
    assert trace.prompt_start == 10
    with pytest.raises(RouteError, match="token 3, layer 1"):
        trace.finish(11, [0] * 4 + [1] * 7)


def test_numbers_that_say_nothing_are_refused() -> None:
    whole, trace = random_routes(9), Trace(SPEC)
    trace.add(sent(whole, 0, 8), 9)
    with pytest.raises(RouteError, match="how many stay"):
        trace.truncate(-3)
    assert trace.rows == 8
    for holes in (-0.1, 1.5, float("nan")):
        with pytest.raises(RouteError, match="is a share of the routes"):
            trace.finish(9, [1] * 9, holes=holes)


def test_nothing_that_is_refused_changes_a_trace() -> None:
    whole, trace = random_routes(9), Trace(SPEC)
    trace.add(sent(whole, 0, 4), 5)
    for data, tokens, start in ((sent(whole, 4, 6), 9, None), (sent(whole, 0, 2), 3, 0), ("?", 9, None)):
        with pytest.raises(RouteError):
            trace.add(data, tokens, start=start)
    assert (trace.rows, trace.prompt_start) == (4, 4)
    trace.add(sent(whole, 4, 8), 9)
    assert trace.finish(9, [1] * 9)[0].idx_TLK[:8].tolist() == whole.idx_TLK[:8].tolist()
