"""Bugs of padding, of the choice of a dispatcher, and of rows on their way to their experts and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell

#: Where all levels of padding differ.
SPLIT = cell("qwen3_moe", "tp2-cp2-ep2", backend="static")


def _factors(change: Callable[[Any, Any], Any]) -> Callable[[Rooms], Iterable[Edit]]:
    """Every factor of a padding plan passes through `change(layout, factor)`; None drops it."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["dispatcher.padding"]
        good = room.plan

        def plan(layout: Any, **more: Any) -> Any:
            found = good(layout, **more)
            changed = (change(layout, factor) for factor in found.factors)
            return replace(found, factors=tuple(factor for factor in changed if factor is not None))

        return [Edit(room, "plan", plan)]

    return edits


def _globally(layout: Any, factor: Any) -> Any:
    return replace(factor, level="total") if "GEMM" in factor.why else factor


def _eight_of_tp(layout: Any, factor: Any) -> Any:
    return replace(factor, level="total", multiple=max(16, 8 * layout.tp)) if "GEMM" in factor.why else factor


def _not_for_hybridep(layout: Any, factor: Any) -> Any:
    return None if "hybridep" in factor.why else factor


def _recipe(name: str, rows: int) -> Callable[[Rooms], Iterable[Edit]]:
    """A recipe padded to another number of rows."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["dispatcher.padding"]
        return [Edit(room, "RECIPES", {**room.RECIPES, name: rows})]

    return edits


def _no_group_maximum(rooms: Rooms) -> Iterable[Edit]:
    def group(self: Any, lengths: Any) -> Any:
        return tuple(self.padded(length) for length in lengths)

    return [Edit(rooms["dispatcher.padding"].Plan, "group", group)]


def _maximum_of_none(rooms: Rooms) -> Iterable[Edit]:
    plan = rooms["dispatcher.padding"].Plan
    good = plan.padded

    def padded(self: Any, length: int) -> Any:
        wanted: Any = None if self.multiple == 1 else length
        return good(self, max(wanted, length))

    return [Edit(plan, "padded", padded)]


def _short_samples(rooms: Rooms) -> Iterable[Edit]:
    plan = rooms["dispatcher.padding"].Plan
    good = plan.pack

    def pack(self: Any, lengths: Any) -> Any:
        found = good(self, lengths)
        pairs = zip(lengths, found.samples, strict=True)
        samples = tuple(length if length < 2 * self.cp * self.tp else padded for length, padded in pairs)
        return replace(found, samples=samples)

    return [Edit(plan, "pack", pack)]


def _multiple_replaced(rooms: Rooms) -> Iterable[Edit]:
    plan = rooms["dispatcher.padding"].Plan
    good = plan.multiple.fget

    def multiple(self: Any) -> Any:
        return 1000 if any("hybridep" in factor.why for factor in self.factors) else good(self)

    return [Edit(plan, "multiple", property(multiple))]


def _cleared_alone(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["dispatcher"]
    good = room.select

    class Fallback:
        def __init__(self, dispatcher: str) -> None:
            self.settings = {"moe_token_dispatcher_type": dispatcher, "moe_flex_dispatcher_backend": None}

    def select(wanted: Any, setup: Any, environment: Any) -> Any:
        try:
            return good(wanted, setup, environment)
        except room.DispatcherError:
            if not str(wanted).startswith("flex"):
                raise
            return Fallback("flex")

    return [Edit(room, "select", select)]


def without_rule(name: str) -> Callable[[Rooms], Iterable[Edit]]:
    """The table of dispatchers without one of its rules."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["dispatcher.table"]
        return [Edit(room, "RULES", tuple(rule for rule in room.RULES if rule.id != name))]

    return edits


def _by_source(rooms: Rooms) -> Iterable[Edit]:
    import torch

    def unsorted(chunks_SL: Any) -> Any:
        return torch.arange(int(chunks_SL.sum()))

    return [Edit(rooms["dispatcher.reference"], "_by_expert", unsorted)]


def _own_share(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["dispatcher.reference"]
    good = room.reduce_scatter

    def reduce_scatter(rows: Any, of_rank: Any, group: Any) -> Any:
        return good(rows, of_rank, group) if room.size(group) == 1 else _piece(room, rows, of_rank, group)

    return [Edit(room, "reduce_scatter", reduce_scatter)]


def _piece(room: Any, rows: Any, of_rank: Any, group: Any) -> Any:
    start = sum(of_rank[: room.rank(group)])
    return rows[start : start + of_rank[room.rank(group)]]


def _not_summed_back(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["dispatcher.reference"]
    good = room.gather

    def gather(rows: Any, of_rank: Any, group: Any) -> Any:
        import torch

        if room.size(group) == 1 or not rows.is_floating_point():
            return good(rows, of_rank, group)
        everyone, me = good(rows.detach(), of_rank, group), room.rank(group)
        start = sum(of_rank[:me])
        return torch.cat([everyone[:start], rows, everyone[start + of_rank[me] :]])

    return [Edit(room, "gather", gather)]


def _padding_counted(rooms: Rooms) -> Iterable[Edit]:
    return [Edit(rooms["dispatcher.routing"], "expert_counts", lambda map_TE, padding_T: map_TE.sum(0))]


def _first_experts(rooms: Rooms) -> Iterable[Edit]:
    return [Edit(rooms["dispatcher.routing"], "pad_experts", lambda row, topk, experts: tuple(range(topk)))]


def _padding_weighs(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["dispatcher.routing"]
    good = room.pad_rows

    def pad_rows(experts_TK: Any, weights_TK: Any, padding_T: Any, experts: int) -> Any:
        return good(experts_TK, weights_TK, padding_T, experts)[0], weights_TK

    return [Edit(room, "pad_rows", pad_rows)]


def _duplicates(rooms: Rooms) -> Iterable[Edit]:
    import torch

    def routing_map(experts_TK: Any, experts: int) -> Any:
        found = torch.zeros(len(experts_TK), experts, dtype=torch.bool)
        return found.scatter(1, experts_TK, True)

    return [Edit(rooms["dispatcher.reference"], "routing_map", routing_map)]


FAULTS = (
    Fault(
        id="no-group-maximum",
        bug="P1 DeepEP#604, ms-swift#8393: every rank pads for itself, and unequal counts hang",
        rules=("DSP-003",),
        cell=SPLIT,
        edits=_no_group_maximum,
        says="ranks of one group were padded to",
    ),
    Fault(
        id="hybridep-not-padded",
        bug="P2 Megatron-Bridge#5270: padding for HybridEP is off, and ranks silently stop learning",
        rules=("DSP-003",),
        cell=SPLIT,
        edits=_factors(_not_for_hybridep),
        says="bf16, flex-hybridep: ranks of one group were padded to",
    ),
    Fault(
        id="fp8-aligned-globally",
        bug="P3 SkyRL#1828: the packed sequence is aligned for fp8, a rank's rows are not",
        rules=("DSP-001",),
        cell=SPLIT,
        edits=_factors(_globally),
        says="delayed takes 16 at a time",
    ),
    Fault(
        id="eight-rows-a-rank",
        bug="P4 ms-swift before #8393: 8·TP with a floor of 16 leaves 8 rows a rank at TP=2",
        rules=("DSP-001",),
        cell=SPLIT,
        edits=_factors(_eight_of_tp),
        says="delayed takes 16 at a time",
    ),
    Fault(
        id="mxfp8-with-sixteen-rows",
        bug="P5 ms-swift#9722, NeMo-RL#1884: mxfp8 is padded as other fp8 is",
        rules=("DSP-001",),
        cell=SPLIT,
        edits=_recipe("mxfp8", 16),
        says="mxfp8 takes 32 at a time",
    ),
    Fault(
        id="blockwise-not-aligned",
        bug="P6 verl#5440: one of two paths does not know blockwise scaling",
        rules=("DSP-001",),
        cell=SPLIT,
        edits=_recipe("blockwise", 1),
        says="blockwise takes 128 at a time",
    ),
    Fault(
        id="maximum-of-none",
        bug="P8 ms-swift#8002: max(None, n) where nothing asks for padding",
        rules=("DSP-001",),
        cell=cell("qwen3_moe", "tp1", backend="static"),
        edits=_maximum_of_none,
        says="refused: TypeError",
    ),
    Fault(
        id="short-samples-not-padded",
        bug="P9 SkyRL#1407: samples shorter than TP·2CP are left as they are",
        rules=("DSP-001",),
        cell=SPLIT,
        edits=_short_samples,
        says="a sample of 1 became 1",
    ),
    Fault(
        id="multiple-replaced",
        bug="P13 ms-swift#8393: with HybridEP the maximum length, 1000, replaces every multiple",
        rules=("DSP-001", "DSP-002"),
        also=("DSP-003",),
        cell=SPLIT,
        edits=_multiple_replaced,
        says="became 2000",
    ),
    Fault(
        id="backend-cleared-alone",
        bug="B8 Megatron-Bridge#5207, Megatron-Bridge#5740: the fallback clears the backend and leaves flex",
        rules=("DSP-004",),
        also=("DSP-005",),
        cell=SPLIT,
        edits=_cleared_alone,
        says="moe_token_dispatcher_type is 'flex' with moe_flex_dispatcher_backend None",
    ),
    Fault(
        id="uneven-rows-under-allgather",
        bug="unequal rows under all-gather or HybridEP: nothing says so before the first step",
        rules=("DSP-005",),
        cell=SPLIT,
        edits=without_rule("equal-rows"),
        says="allgather with unequal rows: taken",
    ),
    Fault(
        id="rows-left-by-source",
        bug="the second permutation of the all-to-all, by local expert, is left out",
        rules=("DSP-006",),
        also=("DSP-008",),  # padding rows are rows as well
        cell=cell("qwen3_moe", "ep2"),
        edits=_by_source,
        says="received other rows than those routed to it",
    ),
    Fault(
        id="shares-not-summed-over-etp",
        bug="each rank of an ETP group keeps its own share of the experts' outputs",
        rules=("DSP-006",),
        cell=cell("qwen3_moe", "tp2"),
        edits=_own_share,
        says="rows come back off a loop over rows",
    ),
    Fault(
        id="gathered-rows-not-summed-back",
        bug="rows are gathered for ETP by a call without a gradient: only the own rank's comes back",
        rules=("DSP-007",),
        cell=cell("qwen3_moe", "tp2"),
        edits=_not_summed_back,
        says="the gradient of the rows is off",
    ),
    Fault(
        id="padding-counted",
        bug="P12 Megatron-Bridge#5470, SkyRL#1908: padding rows count in expert statistics",
        rules=("DSP-008",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_padding_counted,
        says="rows that count for each expert",
    ),
    Fault(
        id="padding-to-the-first-experts",
        bug="R5 verl#7524: padding rows are zeros, and go to the first experts all together",
        rules=("DSP-008",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_first_experts,
        says="padding rows went to expert 0",
    ),
    Fault(
        id="padding-weighs",
        bug="padding rows keep the weights that the router gave them",
        rules=("DSP-008",),
        also=("DSP-007",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_padding_weighs,
        says="a padding row does not weigh zero",
    ),
    Fault(
        id="duplicates-dispatched",
        bug="R4 verl#4986: a row with an expert twice is dispatched to one fewer than k",
        rules=("DSP-009",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_duplicates,
        says="a row with an expert twice in a row was dispatched",
    ),
)
