"""Bugs of padding, of the choice of a dispatcher, and of rows on their way to their experts and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.contract.api import (
    Cell,
    Dispatch,
    DispatcherRequest,
    Layout,
    Padding,
    PadRequest,
    RoundTrip,
    RoutedRows,
    Session,
    World,
)
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell

#: A cell in which all levels of padding differ.
SPLIT = cell("qwen3_moe", "tp2-cp2-ep2", backend="static")
#: A quantised GEMM takes a multiple of this number of rows, by recipe.
GEMM_ROWS = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 32}

Wrap = Callable[[Session, Cell, World], Any]
#: Computes one expert, by its number, for rows [R, H].
Expert = Callable[[int, torch.Tensor], torch.Tensor]


def _padding(wrong: Callable[[Dispatch, PadRequest, Layout], Padding]) -> Wrap:
    """Padding is answered by `wrong(dispatch, request, layout)`, where `dispatch` is the good facet."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.dispatch
        return facet(session, "dispatch", padded=lambda request: wrong(good, request, cell.layout))

    return wrap


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _each_rank_alone(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
    alone = [good.padded(replace(request, lengths=(lengths,))) for lengths in request.lengths]
    return Padding(samples=tuple(p.samples[0] for p in alone), totals=tuple(p.totals[0] for p in alone))


def _not_for_hybridep(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
    hybridep = request.dispatcher == "flex-hybridep"
    return good.padded(replace(request, dispatcher="alltoall") if hybridep else request)


def _whole_sequence(rows: Callable[[Layout, int], int]) -> Wrap:
    """Quantised packed sequences are a multiple of `rows(layout, rows of a GEMM)`, whatever each rank then holds."""

    def wrong(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
        plain = good.padded(replace(request, precision="bf16"))
        if request.precision not in GEMM_ROWS:
            return plain
        multiple = rows(layout, GEMM_ROWS[request.precision])
        return replace(plain, totals=tuple(_round_up(total, multiple) for total in plain.totals))

    return _padding(wrong)


def _precision_taken_for(precision: str, other: str) -> Wrap:
    """Rows of `precision` are padded as those of `other` are."""

    def wrong(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
        return good.padded(replace(request, precision=other) if request.precision == precision else request)

    return _padding(wrong)


def _maximum_of_none(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
    most: Any = 0 if request.precision in GEMM_ROWS else None
    max(most, 0)
    return good.padded(request)


def _longest_of_none(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
    max(length for lengths in request.lengths for length in lengths)
    return good.padded(request)


def _short_samples(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
    short, padding = 2 * layout.cp * layout.tp, good.padded(request)
    pairs = (zip(have, made, strict=True) for have, made in zip(request.lengths, padding.samples, strict=True))
    return replace(padding, samples=tuple(tuple(h if h < short else m for h, m in pair) for pair in pairs))


def _multiple_replaced(good: Dispatch, request: PadRequest, layout: Layout) -> Padding:
    padding = good.padded(request)
    if request.dispatcher != "flex-hybridep":
        return padding
    longest = max(_round_up(sum(samples), 1000) for samples in padding.samples)
    return replace(padding, totals=(longest,) * len(padding.totals))


def _choosing(wrong: Callable[[Dispatch, DispatcherRequest], Mapping[str, Any]]) -> Wrap:
    """Dispatchers are chosen by `wrong(dispatch, request)`, where `dispatch` is the good facet."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.dispatch
        return facet(session, "dispatch", settings=lambda request: wrong(good, request))

    return wrap


def _cleared_alone(good: Dispatch, request: DispatcherRequest) -> Mapping[str, Any]:
    try:
        return good.settings(request)
    except Exception:
        if not request.dispatcher.startswith("flex"):
            raise
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": None}


def _rows_taken_for_equal(good: Dispatch, request: DispatcherRequest) -> Mapping[str, Any]:
    return good.settings(replace(request, equal_rows=True))


def _sending(wrong: Callable[[Dispatch, RoutedRows, Expert], RoundTrip]) -> Wrap:
    """Round trips are made by `wrong(dispatch, rows, expert)`, where `dispatch` is the good facet."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.dispatch
        return facet(session, "dispatch", round_trip=lambda rows, expert: wrong(good, rows, expert))

    return wrap


def _own(rows_RH: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """[R, 1]: which of the rows that reached an expert are this rank's own. Rows are recognised by their values."""
    return (rows_RH[:, None] == rows.x_TH).all(-1).any(1, keepdim=True)


def _by_source(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """Two ranks' rows stay in the order (source, expert), and are split as if in the order (expert, source)."""
    mine: dict[int, list[bool]] = {}

    def look(number: int, rows_RH: torch.Tensor) -> torch.Tensor:
        mine[number] = _own(rows_RH, rows).flatten().tolist()
        return rows_RH

    good.round_trip(rows, look)
    first = torch.distributed.get_rank() == 0
    arrived = [(number, place) for number in sorted(mine) for place in range(len(mine[number]))]
    by_source = sorted(arrived, key=lambda row: (mine[row[0]][row[1]] != first, *row))
    taken_for = {row: number for row, (number, _) in zip(by_source, arrived, strict=True)}

    def misread(number: int, rows_RH: torch.Tensor) -> torch.Tensor:
        out_RH = torch.zeros_like(rows_RH)
        for other in sorted(mine):
            places = [place for place in range(len(rows_RH)) if taken_for[number, place] == other]
            out_RH = out_RH.index_add(0, torch.tensor(places, dtype=torch.int64), expert(other, rows_RH[places]))
        return out_RH

    return good.round_trip(rows, misread)


def _own_share(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """The shares of this rank's rows that other ranks of the ETP group computed are not added."""
    return good.round_trip(rows, lambda number, rows_RH: expert(number, rows_RH) * _own(rows_RH, rows))


def _not_summed_back(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """No gradient goes back to the rows that came from another rank."""

    def cut(number: int, rows_RH: torch.Tensor) -> torch.Tensor:
        return expert(number, torch.where(_own(rows_RH, rows), rows_RH, rows_RH.detach()))

    return good.round_trip(rows, cut)


def _rounded(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """Rows travel in bfloat16."""
    return good.round_trip(rows, lambda number, rows_RH: expert(number, rows_RH.bfloat16().to(rows_RH.dtype)))


def _weights_made_to_sum_to_1(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    return good.round_trip(replace(rows, weights_TK=rows.weights_TK / rows.weights_TK.sum(1, keepdim=True)), expert)


def _probs_in_bf16(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    return good.round_trip(replace(rows, weights_TK=rows.weights_TK.bfloat16().to(rows.weights_TK.dtype)), expert)


def _weighed_twice(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    return good.round_trip(replace(rows, weights_TK=rows.weights_TK * rows.weights_TK), expert)


def _weights_sorted(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    return good.round_trip(replace(rows, weights_TK=rows.weights_TK.sort(1, descending=True).values), expert)


def _slices_taken_for_runs(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """The experts of rows are read as if one row lay after the other in memory, as kernels read them."""
    of_TK = rows.experts_TK
    return good.round_trip(replace(rows, experts_TK=of_TK.as_strided(of_TK.shape, (of_TK.shape[1], 1))), expert)


def _small_ones_dropped(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """A weight that is small, and not zero, is taken for zero."""
    small_TK = (rows.weights_TK > 0) & (rows.weights_TK < 1e-2)
    return good.round_trip(replace(rows, weights_TK=rows.weights_TK.masked_fill(small_TK, 0)), expert)


def _over_capacity(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """What an expert is given beyond an even share weighs nothing."""
    share = -(-rows.experts_TK.numel() // rows.experts)
    flat = rows.experts_TK.flatten().tolist()
    kept = torch.tensor([flat[:place].count(one) < share for place, one in enumerate(flat)], dtype=torch.bool)
    return good.round_trip(replace(rows, weights_TK=rows.weights_TK * kept.view_as(rows.experts_TK)), expert)


def _map_from_weights(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """A row goes to the experts whose weights are not zero: one that underflowed gets no gradient."""
    there_TK = rows.weights_TK != 0
    return good.round_trip(replace(rows, weights_TK=torch.where(there_TK, rows.weights_TK, 0.0)), expert)


def _twice_back(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """Gradients of rows are summed over two ranks that computed the same."""
    return good.round_trip(replace(rows, x_TH=torch.lerp(rows.x_TH.detach(), rows.x_TH, 2.0)), expert)


def _counts(experts_TK: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.bincount(experts_TK.flatten(), minlength=experts)


def _map_of_the_shape(session: Session, cell: Cell, world: World) -> Any:
    """The experts of rows are those of the first rows of their shape."""
    first: dict[torch.Size, torch.Tensor] = {}

    def wrong(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
        experts_TK = first.setdefault(rows.experts_TK.shape, rows.experts_TK)
        return good.round_trip(replace(rows, experts_TK=experts_TK), expert)

    return _sending(wrong)(session, cell, world)


class _OfTheLast(torch.autograd.Function):
    """Rows as they are; their gradients go to the rows that the last forward had there."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, last: list[int]) -> torch.Tensor:
        last.append(len(last))
        ctx.last, ctx.number = last, last[-1]
        return x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient_TH if ctx.last[-1] == ctx.number else gradient_TH.roll(1, 0), None


def _state_of_the_last(session: Session, cell: Cell, world: World) -> Any:
    """What a forward leaves for its backward pass is kept in the dispatcher, where the next forward overwrites it."""
    last: list[int] = []

    def wrong(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
        return good.round_trip(replace(rows, x_TH=_OfTheLast.apply(rows.x_TH, last)), expert)  # type: ignore[no-untyped-call]

    return _sending(wrong)(session, cell, world)


class _OneAfterTheOther(torch.autograd.Function):
    """Rows as they are; their gradients are read as if one row lay after the other in memory, as kernels read them."""

    @staticmethod
    def forward(ctx: Any, y_TH: torch.Tensor) -> torch.Tensor:
        return y_TH.view_as(y_TH)

    @staticmethod
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> torch.Tensor:
        return gradient_TH.as_strided(gradient_TH.shape, (gradient_TH.shape[1], 1))


def _gradients_taken_for_runs(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    trip = good.round_trip(rows, expert)
    return replace(trip, y_TH=_OneAfterTheOther.apply(trip.y_TH))  # type: ignore[no-untyped-call]


def _counted_in(dtype: torch.dtype) -> Callable[[Dispatch, RoutedRows, Expert], RoundTrip]:
    """Rows of each expert are counted in this dtype."""

    def wrong(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
        trip = good.round_trip(rows, expert)
        return replace(trip, counts_E=trip.counts_E.to(dtype).to(trip.counts_E.dtype))

    return wrong


def _padding_counted(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    return replace(good.round_trip(rows, expert), counts_E=_counts(rows.experts_TK, rows.experts))


def _as_rows(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """Padding rows are sent like any other, and left out of the counts afterwards."""
    sent = good.round_trip(replace(rows, padding_T=torch.zeros_like(rows.padding_T)), expert)
    return replace(sent, counts_E=_counts(rows.experts_TK[~rows.padding_T], rows.experts))


def _to_the_first_experts(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    padding_T1 = rows.padding_T[:, None]
    first_K = torch.arange(rows.experts_TK.shape[1])
    experts_TK = torch.where(padding_T1, first_K, rows.experts_TK)
    return _as_rows(good, replace(rows, experts_TK=experts_TK, weights_TK=rows.weights_TK * ~padding_T1), expert)


def _padding_weighs(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """Padding rows go to all experts in turn, with the weights of the router."""
    topk, number_T1 = rows.experts_TK.shape[1], rows.padding_T.cumsum(0)[:, None] - 1
    in_turn_TK = (number_T1 * topk + torch.arange(topk)) % rows.experts
    experts_TK = torch.where(rows.padding_T[:, None], in_turn_TK, rows.experts_TK)
    return _as_rows(good, replace(rows, experts_TK=experts_TK), expert)


def _duplicates(good: Dispatch, rows: RoutedRows, expert: Expert) -> RoundTrip:
    """A repeated expert of a row is replaced by another one with weight zero."""
    experts_TK, weights_TK = rows.experts_TK.clone(), rows.weights_TK.clone()
    for row, chosen in enumerate(experts_TK.tolist()):
        for place in (i for i, one in enumerate(chosen) if one in chosen[:i]):
            experts_TK[row, place] = next(one for one in range(rows.experts) if one not in experts_TK[row].tolist())
            weights_TK[row, place] = 0
    return good.round_trip(replace(rows, experts_TK=experts_TK, weights_TK=weights_TK), expert)


FAULTS = (
    Fault(
        id="no-group-maximum",
        bug="P1 DeepEP#604, ms-swift#8393: every rank pads for itself, and unequal counts hang",
        rules=("DSP-003",),
        cell=SPLIT,
        wrap=_padding(_each_rank_alone),
        says="ranks of one group were padded to",
    ),
    Fault(
        id="hybridep-not-padded",
        bug="P2 Megatron-Bridge#5270: padding for HybridEP is off, and ranks silently stop learning",
        rules=("DSP-003",),
        cell=SPLIT,
        wrap=_padding(_not_for_hybridep),
        says="bf16, flex-hybridep: ranks of one group were padded to",
    ),
    Fault(
        id="fp8-aligned-globally",
        bug="P3 SkyRL#1828: the packed sequence is aligned for fp8, a rank's rows are not",
        rules=("DSP-001",),
        cell=SPLIT,
        wrap=_whole_sequence(lambda layout, rows: rows),
        says="delayed takes 16 at a time",
    ),
    Fault(
        id="eight-rows-a-rank",
        bug="P4 ms-swift before #8393: 8·TP with a floor of 16 leaves 8 rows a rank at TP=2",
        rules=("DSP-001",),
        cell=SPLIT,
        wrap=_whole_sequence(lambda layout, rows: max(16, 8 * layout.tp)),
        says="delayed takes 16 at a time",
    ),
    Fault(
        id="mxfp8-with-sixteen-rows",
        bug="P5 ms-swift#9722, NeMo-RL#1884: mxfp8 is padded as other fp8 is",
        rules=("DSP-001",),
        cell=SPLIT,
        wrap=_precision_taken_for("mxfp8", "delayed"),
        says="mxfp8 takes 32 at a time",
    ),
    Fault(
        id="blockwise-not-aligned",
        bug="P6 verl#5440: one of two paths does not know blockwise scaling",
        rules=("DSP-001",),
        cell=SPLIT,
        wrap=_precision_taken_for("blockwise", "bf16"),
        says="blockwise takes 128 at a time",
    ),
    Fault(
        id="maximum-of-none",
        bug="P8 ms-swift#8002: max(None, n) where nothing asks for padding",
        rules=("DSP-001",),
        cell=cell("qwen3_moe", "tp1", backend="static"),
        wrap=_padding(_maximum_of_none),
        says="refused: TypeError",
    ),
    Fault(
        id="longest-of-no-samples",
        bug="P11 in kind: ranks get a microbatch without samples, so that all have as many, and it has no longest one",
        rules=("DSP-001",),
        cell=cell("qwen3_moe", "tp1", backend="static"),
        wrap=_padding(_longest_of_none),
        says="refused: ValueError",
    ),
    Fault(
        id="short-samples-not-padded",
        bug="P9 SkyRL#1407: samples shorter than TP·2CP are left as they are",
        rules=("DSP-001",),
        cell=SPLIT,
        wrap=_padding(_short_samples),
        says="a sample of 1 became 1",
    ),
    Fault(
        id="multiple-replaced",
        bug="P13 ms-swift#8393: with HybridEP the maximum length, 1000, replaces every multiple",
        rules=("DSP-001", "DSP-002"),
        also=("DSP-003",),
        cell=SPLIT,
        wrap=_padding(_multiple_replaced),
        says="became 1000, where 768 would do",
    ),
    Fault(
        id="backend-cleared-alone",
        bug="B8 Megatron-Bridge#5207, Megatron-Bridge#5740: the fallback clears the backend and leaves flex",
        rules=("DSP-004",),
        also=("DSP-005",),
        cell=SPLIT,
        wrap=_choosing(_cleared_alone),
        says="moe_token_dispatcher_type is 'flex' with moe_flex_dispatcher_backend None",
    ),
    Fault(
        id="uneven-rows-under-allgather",
        bug="unequal rows under all-gather or HybridEP: nothing says so before the first step",
        rules=("DSP-005",),
        cell=SPLIT,
        wrap=_choosing(_rows_taken_for_equal),
        says="allgather with unequal rows: taken",
    ),
    Fault(
        id="rows-left-by-source",
        bug="the second permutation of the all-to-all, by local expert, is left out",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_by_source),
        says="received other rows than those routed to it",
    ),
    Fault(
        id="rows-rounded-on-the-way",
        bug="rows are exchanged in bfloat16, whatever the model has",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_rounded),
        says="rows rounded to bfloat16",
    ),
    Fault(
        id="weights-renormalised-on-the-way",
        bug="flashinfer#2889 in kind: a dispatcher renormalises weights that the router did not",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_weights_made_to_sum_to_1),
        diagnosis="times the right one",
    ),
    Fault(
        id="probs-rounded-on-the-way",
        bug="Megatron-LM#1716 in kind: weights travel beside the rows, in the dtype of these, here bf16",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_probs_in_bf16),
        diagnosis="as with weights rounded to bfloat16",
    ),
    Fault(
        id="weights-squared-on-the-way",
        bug="weights that megatron-core applies at the activation of experts are applied again where rows are combined",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_weighed_twice),
        diagnosis="as with weights squared",
    ),
    Fault(
        id="weights-in-another-order",
        bug="reported nowhere: top-k sorts the weights of a row, and its experts stay in the order that they were in",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_weights_sorted),
        diagnosis="a row's weights in another order",
    ),
    Fault(
        id="slices-of-experts-taken-for-runs",
        bug="vLLM#57167: the experts of rows are a slice of a wider tensor, and a kernel reads them in one run",
        rules=("DSP-006",),
        also=("DSP-008",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_slices_taken_for_runs),
        says="received other rows than those routed to it",
    ),
    Fault(
        id="small-weights-dropped",
        bug="reported nowhere: an expert that weighs little is left out to save its way",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_small_ones_dropped),
        diagnosis="rows lack the output of some of their experts",
    ),
    Fault(
        id="rows-over-capacity-dropped",
        bug="Megatron-LM#1756 in kind: a dispatcher with a capacity drops what it cannot hold",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_over_capacity),
        diagnosis="rows lack the output of some of their experts",
    ),
    Fault(
        id="map-kept-by-shape",
        bug="reported nowhere: a routing map is cached by its shape, and used again for other rows",
        rules=("DSP-006",),
        also=("DSP-008", "DSP-009"),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_map_of_the_shape,
        says="rows come back off a loop over rows",
    ),
    Fault(
        id="map-made-of-weights",
        bug="a routing map that is made of weights: a row whose weight underflowed is not of its expert any more",
        rules=("DSP-007",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_map_from_weights),
        says="the gradient of the weights is off a loop over rows",
    ),
    Fault(
        id="gradients-of-rows-doubled",
        bug="slime#1748, miles#852: the backward pass sums gradients of ranks that computed the same",
        rules=("DSP-007",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_twice_back),
        diagnosis="each row is 2 times the right one",
    ),
    Fault(
        id="shares-not-summed-over-etp",
        bug="each rank of an ETP group keeps its own share of the experts' outputs",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_sending(_own_share),
        says="rows come back off a loop over rows",
    ),
    Fault(
        id="gathered-rows-not-summed-back",
        bug="rows are gathered for ETP by a call without a gradient: only the own rank's comes back",
        rules=("DSP-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_sending(_not_summed_back),
        says="the gradient of the rows is off",
    ),
    Fault(
        id="padding-counted",
        bug="P12 Megatron-Bridge#5470, SkyRL#1908: padding rows count in expert statistics",
        rules=("DSP-008",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_padding_counted),
        says="rows that count for each expert",
    ),
    Fault(
        id="padding-to-the-first-experts",
        bug="R5 verl#7524: padding rows are zeros, and go to the first experts all together",
        rules=("DSP-010",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_to_the_first_experts),
        says="padding rows went to expert 0",
    ),
    Fault(
        id="padding-weighs",
        bug="padding rows keep the weights that the router gave them",
        rules=("DSP-008",),
        also=("DSP-007",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_padding_weighs),
        says="a padding row does not weigh zero",
    ),
    Fault(
        id="duplicates-dispatched",
        bug="R4 verl#4986: a row with an expert twice is dispatched to one fewer than k",
        rules=("DSP-009",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_sending(_duplicates),
        says="a row with an expert twice in a row was dispatched",
    ),
    Fault(
        id="state-of-the-last-forward",
        bug="reported nowhere: a dispatcher keeps what its backward pass needs of the last of several microbatches",
        rules=("DSP-007",),
        cell=cell("qwen3_moe", "one"),
        wrap=_state_of_the_last,
        says="the gradient of the rows is off",
    ),
    Fault(
        id="gradients-taken-for-runs",
        bug="pytorch#120582 in kind: the gradient of the combined rows is transposed, and is read as if it were not",
        rules=("DSP-007",),
        cell=cell("qwen3_moe", "one"),
        wrap=_sending(_gradients_taken_for_runs),
        says="the gradient of the rows is off",
    ),
    Fault(
        id="rows-counted-in-bf16",
        bug="Megatron-LM#7081: tokens of each expert are counted in bf16, which has no odd number over 256",
        rules=("DSP-008",),
        cell=cell("qwen3_moe", "one"),
        wrap=_sending(_counted_in(torch.bfloat16)),
        says="more rows than a byte counts: rows that count for each expert are",
    ),
)
