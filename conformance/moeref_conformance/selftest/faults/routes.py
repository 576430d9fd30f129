"""Replay bugs of alignment: routes for other layers, rows or experts than the router that takes them is at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell


def _by_ordinal(rooms: Rooms) -> Iterable[Edit]:
    """Routes of all layers are indexed by the router's number among the routers; a dense layer's are made legal."""
    received = rooms["replay.engine_formats"]

    def moe_only(array: Any, moe_layers: Sequence[bool]) -> Any:
        numbers = [i for i, moe in enumerate(moe_layers) if moe]
        shifted = np.array(array[:, : len(numbers)])
        given = shifted[:, -1, 0] >= 0
        shifted[given, : numbers[0]] = np.arange(array.shape[2])
        return shifted, numbers

    return [Edit(received, "_moe_only", moe_only)]


def _neighbours(rooms: Rooms) -> Iterable[Edit]:
    """A rank's chunks are taken for neighbours: its part of the routes begins at its first layer and has no gap."""
    align, controller = rooms["replay.align"], rooms["megatron.replay"]

    def stage_layers(layout: Any, moe_layers: Sequence[bool], pp: int, vp: int = 0) -> tuple[int, ...]:
        each = len(moe_layers) // (layout.pp * layout.vpp)
        first = (pp * layout.vpp + vp) * each
        return tuple(range(first, first + each))

    def of_layers(given: Any, layers: Sequence[int]) -> Any:
        from megatron.core import parallel_state as ps

        stages, chunks = (
            ps.get_pipeline_model_parallel_world_size(),
            ps.get_virtual_pipeline_model_parallel_world_size(),
        )
        each, rank = len(given.layers) // chunks, ps.get_pipeline_model_parallel_rank()
        mine = [(vp * stages + rank) * each + i for vp in range(chunks) for i in range(each)]
        places = [mine.index(layer) for layer in layers]
        return replace(given, idx_TLK=given.idx_TLK[:, places], layers=tuple(layers))

    return [Edit(align, "stage_layers", stage_layers), Edit(controller, "select_layers", of_layers)]


def _runs(rooms: Rooms) -> Iterable[Edit]:
    align = rooms["replay.align"]
    return [Edit(align, "zigzag", align.contiguous)]


def _other_tp_rank(rooms: Rooms) -> Iterable[Edit]:
    align = rooms["replay.align"]
    good = align.rank_rows

    def positions(cu_seqlens: Any, *, tp: int = 1, tp_rank: int = 0, **more: Any) -> Any:
        return good(cu_seqlens, tp=tp, tp_rank=0, **more)

    return [Edit(align, "rank_rows", positions)]


def _all_native(rooms: Rooms) -> Iterable[Edit]:
    """One row without a route, and no row of the sample is replayed."""
    controller = rooms["megatron.replay"]
    good = controller._targets

    def targets(given: Any, walked: Any) -> Any:
        found = good(given, walked)
        return [target_TK.fill_(-1) if (target_TK < 0).any() else target_TK for target_TK in found]

    return [Edit(controller, "_targets", targets)]


def _to_the_first(rooms: Rooms) -> Iterable[Edit]:
    import torch

    controller = rooms["megatron.replay"]
    good = controller._targets

    def targets(given: Any, walked: Any) -> Any:
        return [torch.where(t < 0, torch.arange(t.shape[1]), t) for t in good(given, walked)]

    return [Edit(controller, "_targets", targets)]


def _wraps(rooms: Rooms) -> Iterable[Edit]:
    received = rooms["replay.engine_formats"]
    good = received.routes

    def routes(idx_TLK: Any, **more: Any) -> Any:
        return good(np.where(idx_TLK < 0, idx_TLK, idx_TLK.astype(np.uint8)), **more)

    return [Edit(received, "routes", routes)]


def _twice(rooms: Rooms) -> Iterable[Edit]:
    """An expert twice in a row is let through, and sent where it is asked for."""
    return [Edit(rooms["replay.routes"], "check_distinct", lambda *args: None)]


def _rows_made_up(rooms: Rooms) -> Iterable[Edit]:
    """The number of elements, not of rows, is held against the tokens: rows that lack are made up at the end."""
    package = rooms["replay"]
    good, missing = package.to_tokens, package.missing_rows

    def to_tokens(given: Any, tokens: int) -> Any:
        lacks = tokens - given.tokens
        if lacks <= 1 or given.idx_TLK.size < tokens:
            return good(given, tokens)
        return package.concat([given, missing(lacks, given)]), "all"

    return [Edit(package, "to_tokens", to_tokens)]


def _sorted(rooms: Rooms) -> Iterable[Edit]:
    controller = rooms["megatron.replay"]
    good = controller.merge_layers

    def with_layers(parts: Any) -> Any:
        found = good(parts)
        return replace(found, idx_TLK=np.sort(found.idx_TLK, axis=2))

    return [Edit(controller, "merge_layers", with_layers)]


def _replaced(rooms: Rooms) -> Iterable[Edit]:
    """The rows that a resumed rollout brings stand for all: those before them are lost."""
    package = rooms["replay"]

    def continued(earlier: Any, later: Any) -> Any:
        return package.concat([package.missing_rows(later.start, later), later])

    return [Edit(package, "join_turns", continued)]


def _overwritten(rooms: Rooms) -> Iterable[Edit]:
    """Rows that the resumed engine recomputed take the place of those that routed the sampled tokens."""
    package = rooms["replay"]

    def continued(earlier: Any, later: Any) -> Any:
        return replace(
            package.concat([earlier.take(slice(0, later.start - earlier.start)), later]), start=earlier.start
        )

    return [Edit(package, "join_turns", continued)]


FAULTS = (
    Fault(
        id="routes-by-ordinal",
        bug="R1: verl#5037, routes of all layers are indexed by the number of the router: dense layers shift them",
        rules=("RPL-001",),
        also=("RPL-007",),
        cell=cell("glm4_moe", "one", layers=3, replay="R3"),
        edits=_by_ordinal,
        diagnosis="the route of layer 1 (layer -1)",
    ),
    Fault(
        id="chunks-taken-for-neighbours",
        bug="R2: verl#5452, R16: ms-swift, the chunks of a rank under VPP are taken for neighbouring layers",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R3"),
        edits=_neighbours,
        diagnosis="the route of layer",
    ),
    Fault(
        id="routes-cut-in-runs",
        bug="routes are cut over CP in runs, tokens zigzag",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "cp2", replay="R3"),
        edits=_runs,
        diagnosis="the route of token",
    ),
    Fault(
        id="routes-of-the-first-tp-rank",
        bug="R6: miles#551, rows are laid out for DP and not for TP: every TP rank takes those of the first",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "tp2", replay="R3"),
        edits=_other_tp_rank,
        diagnosis="the route of token",
    ),
    Fault(
        id="one-row-missing-all-native",
        bug="R7: miles#645, any -1 disables replay for the whole call",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_all_native,
        diagnosis="the router's own choice",
    ),
    Fault(
        id="resumed-routes-replace",
        bug="R14: verl#6046, miles#3277, the routes of a resumed rollout take the place of all earlier ones",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_replaced,
        says="replay-a: token 0 of sample 0",
        diagnosis="the router's own choice",
        one_rank=True,
    ),
    Fault(
        id="resumed-routes-overwrite",
        bug="R14 in kind: rows that were recomputed when a rollout was resumed overwrite those of the sampled tokens",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_overwritten,
        says="replay-a: token 5 of sample 0",
        one_rank=True,
    ),
    Fault(
        id="missing-rows-to-the-first-experts",
        bug="R5: verl#7524, rows without a route go to the first experts",
        rules=("RPL-003",),
        also=("RPL-004",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_to_the_first,
        diagnosis="the first experts",
        one_rank=True,
    ),
    Fault(
        id="experts-wrap",
        bug="R12: prime-rl#3051, ms-swift: experts are cast to uint8, where 256 becomes 0",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_wraps,
        says="wraps",
    ),
    Fault(
        id="expert-twice-let-through",
        bug="R4: verl#4986, an expert twice in a row: the all-to-all counts T·k routes, the map has fewer",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3", dispatcher="allgather"),
        edits=_twice,
        says="twice in a row",
    ),
    Fault(
        id="rows-made-up",
        bug="R10: verl#7261, the number of elements is compared with the length, so that rows may lack",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_rows_made_up,
        says="three rows too few",
    ),
    Fault(
        id="routes-kept-as-sets",
        bug="recorded routes are sorted: sums over a token's experts are taken in another order",
        rules=("RPL-005",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        edits=_sorted,
        says="off the recorded ones",
    ),
)
