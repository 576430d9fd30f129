"""Hypothesis strategies for your own property tests: layouts, routes, packed lengths, and requests for padding.

Only this module of the kit needs Hypothesis. Examples shrink towards one rank, few rows and short samples::

    from moeref_conformance import strategies

    @given(strategies.layouts(), strategies.pad_requests())
    def test_padding(layout, request): ...

Shapes: T rows, H hidden, K experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from moeref_conformance.contract import cells  # Layout alone would be ambiguous in the documentation
from moeref_conformance.contract.api import PadRequest, RoutedRows
from moeref_conformance.contract.requests.dispatch import DISPATCHERS, PRECISIONS

SIZES = (1, 2, 3, 4, 8)


@st.composite
def layouts(
    draw: DrawFn, sizes: Sequence[int] = SIZES, *, replicas: Sequence[int] = (1, 3), pp: Sequence[int] | None = None
) -> cells.Layout:
    """Layouts whose world is a multiple of both grids: TP, EP, CP and ETP of `sizes`, PP of `pp` (default `sizes`).

    `replicas` are multiples of the smallest world. VPP is 1, 2 or 3 where PP exceeds 1. Whether a model's layers
    and experts divide is another matter.
    """
    size, stages = st.sampled_from(sizes), st.sampled_from(pp or sizes)
    made = cells.Layout(tp=draw(size), pp=draw(stages), ep=draw(size), cp=draw(size), etp=draw(st.none() | size))
    vpp = draw(st.sampled_from((1, 2, 3))) if made.pp > 1 else 1
    return replace(made, vpp=vpp, world=made.world * draw(st.sampled_from(replicas)))


@st.composite
def routes(
    draw: DrawFn,
    *,
    rows: SearchStrategy[int] | None = None,
    experts: SearchStrategy[int] | None = None,
    most_topk: int = 8,
) -> tuple[torch.Tensor, int]:
    """Routes `experts_TK` (int64, distinct in each row) and how many experts there are.

    `rows` defaults to 0…12, `experts` to 1…8. Half of them are skewed, so that some experts stay without rows.
    """
    of = draw(experts or st.integers(1, 8))
    topk, count = draw(st.integers(1, min(of, most_topk))), draw(rows or st.integers(0, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    skew = draw(st.sampled_from((0.0, 1.0)))
    scores_TE = torch.rand(count, of, generator=generator) + skew * torch.arange(of)
    return scores_TE.topk(topk).indices, of


@st.composite
def routed_rows(
    draw: DrawFn,
    *,
    rows: SearchStrategy[int] | None = None,
    experts: SearchStrategy[int] | None = None,
    hidden: int = 3,
    padding: bool = True,
) -> RoutedRows:
    """Rows of one rank in float64 with `routes` and positive weights; any may be padding unless `padding` is off."""
    experts_TK, of = draw(routes(rows=rows, experts=experts))
    count = len(experts_TK)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    padded = draw(st.lists(st.booleans(), min_size=count, max_size=count)) if padding else [False] * count
    return RoutedRows(
        x_TH=torch.randn(count, hidden, generator=generator, dtype=torch.float64),
        weights_TK=torch.rand(experts_TK.shape, generator=generator, dtype=torch.float64) + 0.1,
        experts_TK=experts_TK,
        padding_T=torch.tensor(padded, dtype=torch.bool),
        experts=of,
    )


def lengths(most: int = 2000, samples: int = 6) -> SearchStrategy[tuple[int, ...]]:
    """Lengths of at most `samples` samples of one packed sequence, 1…`most` each; short ones come often."""
    one = st.integers(1, min(9, most)) | st.integers(1, most)
    return st.lists(one, max_size=samples).map(tuple)


def pad_requests(ranks: int | None = None, *, most: int = 2000) -> SearchStrategy[PadRequest]:
    """Requests for padding: lengths of `ranks` ranks of a group (default 1…4), of any precision and dispatcher."""
    return st.builds(
        PadRequest,
        lengths=st.lists(lengths(most), min_size=ranks or 1, max_size=ranks or 4).map(tuple),
        precision=st.sampled_from(PRECISIONS),
        dispatcher=st.sampled_from(DISPATCHERS),
    )


__all__ = ["SIZES", "layouts", "lengths", "pad_requests", "routed_rows", "routes"]
