"""`routes`: errors name the place, and casts to a narrower type never wrap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.replay import (
    GIVEN,
    MISSING,
    RouteError,
    concat,
    index_dtype,
    merge_layers,
    read,
    routes,
    select_layers,
    spread_experts,
    write,
)
from tests.unit.routes import random_routes


def test_the_narrowest_type_that_holds_every_expert() -> None:
    assert [index_dtype(n).name for n in (1, 256, 257, 65536)] == ["uint8", "uint8", "uint16", "uint16"]
    for bad in (0, 65537):
        with pytest.raises(RouteError, match=f"experts={bad}"):
            index_dtype(bad)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64, np.uint16])
def test_no_type_wraps(kind: type) -> None:
    given_TLK = np.array([[[300, 44]]], kind)
    assert routes(given_TLK, layers=[0], experts=384).idx_TLK.tolist() == [[[300, 44]]]
    with pytest.raises(RouteError, match="expert 300 is outside 0 to 255"):
        routes(given_TLK, layers=[0], experts=256)


@pytest.mark.parametrize(("kind", "experts"), [(np.uint8, 257), (np.int8, 129), (np.int16, 32769)])
def test_a_type_that_does_not_hold_every_expert_may_have_wrapped(kind: type, experts: int) -> None:
    given_TLK = np.array([[[3, 44]]], kind)
    with pytest.raises(RouteError, match=rf"{np.dtype(kind).name}, which does not hold {experts} experts"):
        routes(given_TLK, layers=[0], experts=experts)
    assert routes(given_TLK, layers=[0], experts=experts - 1).tokens == 1


@pytest.mark.parametrize("version", [True, 1.0, 1.5, "1", None])
def test_a_version_is_an_integer(version: object) -> None:
    with pytest.raises(RouteError, match="no integer"):
        routes(np.zeros((1, 1, 1), int), layers=[0], experts=4, version=version)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [1 << 31, -(1 << 31) - 1, np.int64(1 << 40)])
def test_a_version_has_32_bits(version: int) -> None:
    with pytest.raises(RouteError, match="not a 32-bit number"):
        routes(np.zeros((1, 1, 1), int), layers=[0], experts=4, version=version)


def test_an_array_of_the_right_type_is_not_copied() -> None:
    idx = np.zeros((2, 1, 1), np.uint8)
    assert routes(idx, layers=[0], experts=4).idx_TLK is idx


def test_a_row_of_minus_one_is_missing_and_no_other() -> None:
    made = routes([[[0, 1], [2, 3]], [[-1, -1], [-1, -1]]], layers=[3, 5], experts=4)
    assert made.kind_T.tolist() == [GIVEN, MISSING]
    assert made.idx_TLK[0].tolist() == [[0, 1], [2, 3]]
    with pytest.raises(RouteError, match="token 11, layer 5: -1 beside experts in one route"):
        routes([[[0, 1], [2, 3]], [[0, 1], [-1, 2]]], layers=[3, 5], experts=4, start=10)


def test_a_hole_in_one_layer_is_no_missing_row() -> None:
    made = routes([[[0, 1], [2, 3]], [[0, 1], [-1, -1]]], layers=[3, 5], experts=4)
    assert made.kind_T.tolist() == [GIVEN, GIVEN]
    assert made.missing_TL.tolist() == [[False, False], [False, True]]
    assert made.idx_TLK[:, 0].tolist() == [[0, 1], [0, 1]]
    assert not made.equals(routes([[[0, 1], [2, 3]], [[0, 1], made.idx_TLK[1, 1]]], layers=[3, 5], experts=4))
    assert not select_layers(made, [3]).missing_TL.any()
    assert select_layers(made, [5]).missing_TL.tolist() == [[False], [True]]
    assert merge_layers([select_layers(made, [5]), select_layers(made, [3])]).equals(made)
    assert concat([made.take([0]), made.take([1])]).equals(made)
    assert read(write(made)).equals(made)
    assert read(write(made, zstd=True)).equals(made)


def test_a_route_of_zeros_is_a_hole_if_asked_for() -> None:
    given_TLK = [[[0, 0], [2, 3]], [[0, 0], [0, 0]], [[1, 0], [2, 0]]]
    with pytest.raises(RouteError, match="token 0, layer 3: expert 0 twice"):
        routes(given_TLK, layers=[3, 5], experts=4)
    made = routes(given_TLK, layers=[3, 5], experts=4, zeros=True)
    assert made.missing_TL.tolist() == [[True, False], [True, True], [False, False]]
    assert made.kind_T.tolist() == [GIVEN, MISSING, GIVEN]
    # A top-k of 1 may well choose expert 0.
    assert not routes([[[0]]], layers=[3], experts=4, zeros=True).missing_TL.any()


@pytest.mark.parametrize(
    ("given_TLK", "more", "says"),
    [
        ([[0, 1]], {}, r"integers \[tokens, layers, top-k\]"),
        ([[[0.0, 1.0]]], {}, "float64"),
        ([[[0, 1]]], {"layers": [0, 1]}, "must be 1 ascending"),
        ([[[0, 1], [0, 1]]], {"layers": [3, 2]}, "ascending"),
        ([[[0, 4]]], {}, "token 0, layer 0: expert 4 is outside 0 to 3"),
        ([[[0, -2]]], {}, "expert -2 is outside"),
        ([[[2, 2]]], {}, r"token 0, layer 0: expert 2 twice in \[2, 2\]"),
        ([[[0, 1, 2, 3, 0]]], {}, "top-5 of 4|top-k 5 of 4"),
        ([[[0, 1]]], {"start": -1}, "start=-1"),
        (np.zeros((2, 1, 0), int), {}, "top-k 0"),
    ],
)
def test_malformed_routes_are_refused_by_place(given_TLK: object, more: dict[str, object], says: str) -> None:
    with pytest.raises(RouteError, match=says):
        routes(given_TLK, **{"layers": [0], "experts": 4, **more})  # type: ignore[arg-type]


@given(rows=st.integers(0, 60), top_k=st.integers(1, 8), experts=st.integers(8, 300), first=st.integers(0, 9))
def test_spread_rows_are_distinct_and_even(rows: int, top_k: int, experts: int, first: int) -> None:
    found = spread_experts(rows, 2, top_k, experts, first)
    assert found.shape == (rows, 2, top_k)
    assert all(len(set(row)) == top_k for row in found[:, 0].tolist())
    counts = np.bincount(found[:, 1].reshape(-1).astype(int), minlength=experts)
    assert counts.max(initial=0) - counts.min(initial=rows * top_k) <= 1


def test_parts_of_another_model_are_not_joined() -> None:
    with pytest.raises(RouteError, match="part 1 has layers"):
        concat([random_routes(2), random_routes(2, layers=(1, 2))])
    with pytest.raises(RouteError, match="no routes"):
        concat([])
