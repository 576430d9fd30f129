"""The facet `dispatch`: oracles against hand-computed numbers, moeref against them, and the published strategies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from moeref_conformance import strategies
from moeref_conformance.contract.api import (
    Cell,
    Dispatch,
    DispatcherRequest,
    Layout,
    Padding,
    PadRequest,
    RoutedRows,
    Session,
    World,
)
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.requests.exchange import EXCHANGES, GRADIENTS
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.oracles import dispatch
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.border import Swapped
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.static import StaticWorld

pytestmark = pytest.mark.cpu
SPLIT = Layout(tp=2, cp=2, ep=2)


@pytest.fixture(scope="module")
def facet(tmp_path_factory: pytest.TempPathFactory) -> Dispatch:
    folder = tmp_path_factory.mktemp("dispatch")
    cell = Cell(family="qwen3_moe", layout_name="split", layout=SPLIT, backend="static", layers=2)
    hf_config = Path(expected(cell, folder).inputs["hf_config"])
    world = World(backend="static", rank=-1, size=SPLIT.world, device="cpu", workdir=folder, hf_config=hf_config)
    with MoerefTarget().open(cell, world) as session:
        assert isinstance(session.dispatch, Dispatch)
        return session.dispatch


@pytest.mark.parametrize(
    ("layout", "samples", "total", "rows"),
    [
        (Layout(), (3, 5), 8, 8),
        (Layout(tp=2), (3, 5), 8, 4),
        (Layout(tp=2), (3, 4), 7, None),
        (Layout(cp=2), (4, 8), 12, 6),
        (Layout(cp=2), (4, 6), 12, None),  # 6 does not split into 4 chunks, though 12 does into 2
        (Layout(cp=2), (4,), 6, None),  # nor does the tail
        (Layout(tp=2, cp=2), (4, 4), 64, 16),
        (Layout(tp=4, cp=2), (4,), 12, None),
        (Layout(), (4,), 3, None),
    ],
)
def test_rows_of_a_rank(layout: Layout, samples: tuple[int, ...], total: int, rows: int | None) -> None:
    assert dispatch.rank_rows(layout, samples, total) == rows


def test_the_least_padding_of_bugs_of_the_field() -> None:
    def total(layout: Layout, precision: str, *lengths: int, dispatcher: str = "alltoall") -> tuple[int, ...]:
        request = PadRequest(lengths=tuple((n,) for n in lengths), precision=precision, dispatcher=dispatcher)
        return dispatch.least(layout, request).totals

    assert total(Layout(tp=2, cp=2), "delayed", 20) == (64,)
    assert total(Layout(tp=2), "delayed", 16) == (32,)
    assert total(Layout(tp=2), "mxfp8", 33) == (64,)
    assert total(Layout(tp=2), "blockwise", 130) == (256,)
    assert total(Layout(), "bf16", 7) == (7,)
    assert total(Layout(ep=4), "bf16", 1, 65, 128, 130, dispatcher="flex-hybridep") == (192,) * 4
    assert total(Layout(ep=4), "bf16", 1, 65, dispatcher="allgather") == (65, 65)
    assert total(Layout(ep=4), "bf16", 1, 65, dispatcher="flex-deepep") == (1, 65)


@given(strategies.layouts(pp=(1,), replicas=(1,)), strategies.pad_requests(most=300))
@settings(deadline=None, max_examples=60)
def test_the_least_padding_keeps_its_promises_and_no_smaller_one_does(layout: Layout, request: PadRequest) -> None:
    least = dispatch.least(layout, request)
    for rank, samples in enumerate(least.samples):
        assert dispatch.broken(layout, request, rank, least) == []
        for total in range(sum(samples), least.totals[rank]) if request.dispatcher not in dispatch.EQUAL else ():
            totals = tuple(total if other == rank else kept for other, kept in enumerate(least.totals))
            assert dispatch.broken(layout, request, rank, Padding(samples=least.samples, totals=totals))


@given(strategies.pad_requests())
@settings(deadline=None, max_examples=60)
def test_moeref_pads_to_the_least(facet: Dispatch, request: PadRequest) -> None:
    assert facet.padded(request) == dispatch.least(SPLIT, request)


def test_every_broken_promise_is_told() -> None:
    request = PadRequest(lengths=((3, 20),), precision="delayed")

    def told(samples: tuple[int, ...], total: int) -> list[str]:
        return dispatch.broken(SPLIT, request, 0, Padding(samples=(samples,), totals=(total,)))

    assert told((4, 20), 64) == []
    assert told((4, 16), 64) == ["a sample of 20 became 16"]
    assert told((3, 20), 64) == ["a sample of 3 became 3, which does not split into 4 chunks"]
    assert told((4, 20), 62) == ["samples of [4, 20] became 62, which does not split over cp 2, tp 2"]
    assert told((4, 20), 32) == ["32 gives a rank 8 rows, where delayed takes 16 at a time"]
    assert told((4,), 64) == ["2 samples became 1"]


@pytest.mark.parametrize(
    ("layout", "request_", "why"),
    [
        (SPLIT, DispatcherRequest(dispatcher="alltoall", precision="fp32", equal_rows=False), ""),
        (SPLIT, DispatcherRequest(dispatcher="allgather", equal_rows=False), "equal pieces"),
        (Layout(), DispatcherRequest(dispatcher="allgather", equal_rows=False), ""),
        (SPLIT, DispatcherRequest(dispatcher="flex-deepep", packages=frozenset({"deep_ep"})), "a GPU"),
        (SPLIT, DispatcherRequest(dispatcher="flex-deepep", gpu=True), "deep_ep is not installed"),
        (SPLIT, DispatcherRequest(dispatcher="pigeon"), "no such"),
    ],
)
def test_what_cannot_work(facet: Dispatch, layout: Layout, request_: DispatcherRequest, why: str) -> None:
    found = dispatch.cannot_work(layout, request_)
    assert why in found
    assert bool(found) == bool(why)
    if layout == SPLIT and why:
        with pytest.raises(ValueError, match=request_.dispatcher):
            facet.settings(request_)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_loop_over_rows_is_worth_a_comparison(dispatcher: str) -> None:
    layout = Layout(tp=2, ep=2, etp=2)
    loops = [dispatch.looped(layout, dispatcher, number, rank) for number in range(len(EXCHANGES)) for rank in range(4)]
    assert any(not loop.received[expert] for loop in loops for expert in loop.received)
    assert any(loop.padding[rank] for loop in loops for rank in loop.padding)
    for loop in loops:
        assert set(loop.gradients) == set(GRADIENTS)
    rows = [{len(loop.y_TH) for loop in loops[4 * n : 4 * n + 4]} for n in range(len(EXCHANGES))]
    assert all(len(found) == 1 for found in rows) == (dispatcher == "allgather")


def test_a_target_that_answers_nonsense_is_told_so(tmp_path: Path) -> None:
    class Nonsense:
        def padded(self, request: PadRequest) -> Padding:
            return Padding(samples=(), totals=())

        def settings(self, request: DispatcherRequest) -> dict[str, str]:
            return {"moe_token_dispatcher_type": "alltoall"}

    class Nonsensical(MoerefTarget):
        @contextmanager
        def open(self, cell: Cell, world: World) -> Iterator[Session]:
            with super().open(cell, world) as session:
                yield Swapped(session, dispatch=Nonsense())

    cell = Cell(family="qwen3_moe", layout_name="split", layout=SPLIT, backend="static", layers=2)
    made, judged = expected(cell, tmp_path), Nonsensical()
    outcome = StaticWorld(judged).run(cell, tmp_path / "cell", made.inputs, judged.claims)
    observation = Observation.read(cell, tmp_path, outcome)
    case = Case(cell=cell, expected=made, observation=observation, baseline=None, claims=judged.claims)
    found = {rule: JUDGES[rule](case).findings for rule in ("DSP-001", "DSP-004", "DSP-005")}
    assert "4 ranks asked, 0 answered" in found["DSP-001"][0].message
    assert "moe_flex_dispatcher_backend 'nothing'" in found["DSP-004"][0].message
    assert any("a dispatcher that does not exist: taken" in f.message for f in found["DSP-005"])


@given(strategies.layouts())
@settings(deadline=None)
def test_drawn_layouts_are_whole(layout: Layout) -> None:
    assert layout.world % math.lcm(layout.tp * layout.pp * layout.cp, layout.expert_tp * layout.ep * layout.pp) == 0
    assert layout.vpp == 1 or layout.pp > 1


@given(strategies.routed_rows())
@settings(deadline=None)
def test_drawn_routes_are_legal(rows: RoutedRows) -> None:
    assert rows.experts_TK.shape == rows.weights_TK.shape
    assert len(rows.x_TH) == len(rows.padding_T) == len(rows.experts_TK)
    assert rows.experts_TK.dtype == torch.int64
    assert all(len(set(row)) == len(row) for row in rows.experts_TK.tolist())
    assert not rows.experts_TK.numel() or 0 <= int(rows.experts_TK.min()) <= int(rows.experts_TK.max()) < rows.experts


@given(strategies.pad_requests(3))
@settings(deadline=None)
def test_drawn_requests_have_the_ranks_asked_for(request: PadRequest) -> None:
    assert len(request.lengths) == 3
    assert request.precision in dispatch.GEMM_ROWS
