"""Aligns routes with the trainer's data: rows with tokens, samples with packed batches, tokens and layers with ranks.

Each step is a pure function with its inverse next to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from moeref.layout import Layout
from moeref.layout.sequence import contiguous, restored, zigzag
from moeref.replay.routes import MISSING, PAD, RouteError, Routes, concat, missing_rows, spread_experts

RowRule = Literal["all", "all but the last"]
CPRule = Literal["zigzag", "contiguous"]


# Rows and tokens


def to_tokens(routes: Routes, tokens: int, *, start: int = 0) -> tuple[Routes, RowRule]:
    """Routes with one row for each of `tokens`, and which tokens had a row.

    An engine never runs the last token it sampled, so T - 1 rows cover prompt and completion without the last token;
    its row becomes MISSING. Raises RouteError for any other number of rows, and for rows that do not begin at position
    `start` of the sequence: an engine with a cached prefix may send only the rows after it.
    """
    if routes.start != start:
        raise RouteError(
            f"rows begin at token {routes.start} of their sequence, the tokens at {start}; join the rows of the prefix "
            f"before them, or leave them to the router: join_turns(missing_rows({routes.start}, routes), routes)"
        )
    if routes.tokens == tokens:
        return routes, "all"
    if routes.tokens == tokens - 1:
        return replace(concat([routes, missing_rows(1, routes)]), start=routes.start), "all but the last"
    raise RouteError(f"{routes.tokens} rows of routes for {tokens} tokens; expected {tokens} or {tokens - 1}")


def from_tokens(routes: Routes, rule: RowRule) -> Routes:
    """The rows as the engine sent them. Inverse of `to_tokens`."""
    return routes if rule == "all" else routes.take(slice(0, -1))


def truncate(routes: Routes, tokens_T: npt.NDArray[np.integer], keep: slice) -> tuple[Routes, npt.NDArray[np.integer]]:
    """The rows and tokens that the slice `keep` selects. Raises RouteError unless every token has a row.

    Inverse: `join_turns` of the kept part and the part cut off.
    """
    if len(tokens_T) != routes.tokens:
        raise RouteError(f"{len(tokens_T)} tokens and {routes.tokens} rows of routes; align them before truncating")
    first, stop, step = keep.indices(routes.tokens)
    if step != 1:
        raise RouteError(f"truncation keeps a run of tokens, not every {step}th")
    return routes.take(slice(first, stop), start=routes.start + first), tokens_T[keep]


def join_turns(earlier: Routes, later: Routes) -> Routes:
    """The routes of a rollout and of its next turn or resumption, in one. Each row keeps its weight version.

    `later.start` says where the later rows begin. Where both have a row, the earlier one stays: it routed the token
    that was sampled, the later one only recomputed it. A MISSING last row is filled from the later rows. Inverse:
    `take`. Raises RouteError for a gap, and if the later rows begin before the earlier ones or end before they do: then
    the rollout was taken back, or is a different one.
    """
    end = earlier.start + earlier.tokens
    if later.start > end:
        raise RouteError(f"rows end at token {end} and go on at {later.start}; {later.start - end} tokens have no row")
    if later.start < earlier.start or later.start + later.tokens < end:
        raise RouteError(
            f"rows of tokens {earlier.start} to {end} are not continued by those of {later.start} to "
            f"{later.start + later.tokens}; if the rollout was taken back, take() the rows that still hold"
        )
    overlap = end - later.start
    if overlap and earlier.tokens and earlier.kind_T[-1] == MISSING and overlap <= later.tokens:
        earlier, overlap = earlier.take(slice(0, -1)), overlap - 1
    return replace(concat([earlier, later.take(slice(overlap, None))]), start=earlier.start)


def pad(routes: Routes, *, left: int = 0, right: int = 0) -> Routes:
    """`routes` with PAD rows before and after."""
    if left < 0 or right < 0:
        raise RouteError(f"padding of {left} and {right} rows")
    parts = [missing_rows(left, routes, PAD), routes, missing_rows(right, routes, PAD)]
    return replace(concat([p for p in parts if p.tokens] or parts[:1]), start=routes.start)


def unpad(routes: Routes) -> Routes:
    """`routes` without its PAD rows. Inverse of `pad`."""
    return routes.take(routes.kind_T != PAD)


@dataclass(frozen=True)
class Packed:
    """Samples in one sequence: rows cu_seqlens[i] to cu_seqlens[i + 1] are sample i with its padding."""

    routes: Routes
    cu_seqlens: tuple[int, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise RouteError unless cu_seqlens ascends from 0 to the number of rows, with one entry more than samples."""
        ends = self.cu_seqlens
        if not ends or ends[0] != 0 or list(ends) != sorted(ends) or len(ends) != len(self.starts) + 1:
            raise RouteError(f"cu_seqlens {list(ends)} of {len(self.starts)} samples; expected 0 and the end of each")
        if ends[-1] != self.routes.tokens:
            raise RouteError(f"cu_seqlens end at {ends[-1]}, but there are {self.routes.tokens} rows")

    def sample(self, number: int) -> slice:
        """The rows of one sample."""
        return slice(self.cu_seqlens[number], self.cu_seqlens[number + 1])


def pack(samples: Sequence[Routes], *, multiple: int = 1) -> Packed:
    """Pack samples into one sequence; each is padded on the right to `multiple` (2·CP, or what the precision needs)."""
    if multiple < 1:
        raise RouteError(f"multiple={multiple} must be at least 1")
    parts = [pad(s, right=-s.tokens % multiple) for s in samples]
    ends = np.cumsum([0, *(p.tokens for p in parts)])
    whole = replace(concat(parts), start=0)
    pads = np.flatnonzero(whole.kind_T == PAD)
    if pads.size:  # spread the padding of all samples together; each sample alone would start at expert 0
        whole.idx_TLK[pads] = spread_experts(pads.size, len(whole.layers), whole.top_k, whole.experts)
    return Packed(whole, tuple(int(n) for n in ends), tuple(s.start for s in samples))


def unpack(batch: Packed) -> list[Routes]:
    """The samples of a batch, without padding. Inverse of `pack`."""
    return [unpad(batch.routes.take(batch.sample(i), start=start)) for i, start in enumerate(batch.starts)]


# Tokens and ranks


def rank_rows(
    cu_seqlens: Sequence[int], *, cp: int = 1, cp_rank: int = 0, tp: int = 1, tp_rank: int = 0, rule: CPRule = "zigzag"
) -> npt.NDArray[np.intp]:
    """Which rows of a packed batch a rank holds, in the rank's order.

    Each sample is split over CP by `rule`. The rows of a CP rank are then split over TP into contiguous parts (sequence
    parallelism). Raises LayoutError for a sample that does not divide.
    """
    cut = zigzag if rule == "zigzag" else contiguous
    parts = [
        begin + np.asarray(cut(end - begin, cp, cp_rank), np.intp) for begin, end in itertools.pairwise(cu_seqlens)
    ]
    mine = np.concatenate(parts) if parts else np.zeros(0, np.intp)
    return mine[np.asarray(contiguous(len(mine), tp, tp_rank), np.intp)] if tp > 1 else mine


def shard_to_rank(batch: Packed, layout: Layout, rank: int, *, rule: CPRule = "zigzag") -> Routes:
    """The rows that the routers of `rank` see: its CP part and, with tp > 1, its sequence-parallel part of that."""
    at = layout.coords(rank)
    where = rank_rows(batch.cu_seqlens, cp=layout.cp, cp_rank=at.cp, tp=layout.tp, tp_rank=at.tp, rule=rule)
    return batch.routes.take(where)


def gather_ranks(
    parts: Mapping[tuple[int, int], Routes], cu_seqlens: Sequence[int], layout: Layout, *, rule: CPRule = "zigzag"
) -> Routes:
    """The rows of the whole batch, from the parts of all (cp, tp) ranks. Inverse of `shard_to_rank`."""
    keys = [(cp, tp) for cp in range(layout.cp) for tp in range(layout.tp)]
    if parts.keys() != set(keys):
        raise RouteError(f"parts of ranks (cp, tp) {sorted(parts)}, expected {keys}")
    where = [rank_rows(cu_seqlens, cp=layout.cp, cp_rank=cp, tp=layout.tp, tp_rank=tp, rule=rule) for cp, tp in keys]
    for key, mine in zip(keys, where, strict=True):
        if parts[key].tokens != len(mine):
            raise RouteError(f"rank (cp, tp) {key} has {parts[key].tokens} rows, expected {len(mine)}")
    return concat([parts[key] for key in keys]).take(np.asarray(restored([list(map(int, w)) for w in where]), np.intp))


# Layers


def select_layers(routes: Routes, layers: Sequence[int]) -> Routes:
    """The routes of `layers`, given by global number, in that order. Raises RouteError for a layer without routes."""
    at = {layer: i for i, layer in enumerate(routes.layers)}
    lacking = [layer for layer in layers if layer not in at]
    if lacking:
        raise RouteError(f"no routes for layers {lacking}; there are routes for {list(routes.layers)}")
    chosen = [at[layer] for layer in layers]
    return replace(routes, idx_TLK=np.ascontiguousarray(routes.idx_TLK[:, chosen]), layers=tuple(layers))


def stage_layers(layout: Layout, moe_layers: Sequence[bool], pp: int, vp: int = 0) -> tuple[int, ...]:
    """The global numbers of the MoE layers of stage (pp, vp), in the order of its routers.

    Select by these numbers, never by position: under VPP the chunks of a rank are not adjacent, and dense layers have
    no router.
    """
    return tuple(i for i in layout.stages(len(moe_layers)).layers[pp, vp] if moe_layers[i])


def merge_layers(parts: Sequence[Routes]) -> Routes:
    """The layers of all parts, ascending. Inverse of `select_layers` over all stages.

    All parts must have the same rows. A part without layers, from a stage without MoE layers, adds nothing.
    """
    if not parts:
        raise RouteError("no routes to join")
    parts = [part for part in parts if part.layers] or parts[:1]
    first = parts[0]
    for part in parts[1:]:
        if part.tokens != first.tokens or (part.kind_T != first.kind_T).any():
            raise RouteError("stages to be joined have other rows than the first")
    numbers = [layer for part in parts for layer in part.layers]
    if len(set(numbers)) < len(numbers):
        raise RouteError(f"layers {sorted({n for n in numbers if numbers.count(n) > 1})} come twice")
    order = np.argsort(numbers)
    return replace(
        first,
        idx_TLK=np.ascontiguousarray(np.concatenate([p.idx_TLK for p in parts], axis=1)[:, order]),
        layers=tuple(sorted(numbers)),
    )
