"""Aligns the routes of one sample with its tokens, and the layers of routes with the stages of a pipeline.

Each step is a pure function with its inverse next to it. `microbatch` puts samples together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from moeref.layout import Layout
from moeref.replay.routes import MISSING, PAD, RouteError, Routes, concat, joined_holes, missing_rows

RowRule = Literal["all", "all but the last"]


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
    that was sampled, the later one only recomputed it. MISSING rows are filled from the later rows. Inverse: `take`.
    Raises RouteError for a gap, and if the later rows begin before the earlier ones or end before they do: then
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
    joined = concat([earlier, later])
    rows = np.r_[: earlier.tokens, earlier.tokens + end - later.start : joined.tokens]
    lacks = np.flatnonzero(earlier.kind_T == MISSING)
    lacks = lacks[lacks >= later.start - earlier.start]
    rows[lacks] = earlier.tokens + lacks - (later.start - earlier.start)
    return joined.take(rows, start=earlier.start)


def pad(routes: Routes, *, left: int = 0, right: int = 0) -> Routes:
    """`routes` with PAD rows before and after. Raises RouteError for a negative number of them."""
    if left < 0 or right < 0:
        raise RouteError(f"left={left} and right={right} rows of padding must be at least 0")
    parts = [missing_rows(left, routes, PAD), routes, missing_rows(right, routes, PAD)]
    return replace(concat([p for p in parts if p.tokens] or parts[:1]), start=routes.start)


def unpad(routes: Routes) -> Routes:
    """`routes` without its PAD rows. Inverse of `pad`."""
    return routes.take(routes.kind_T != PAD)


# Layers


def select_layers(routes: Routes, layers: Sequence[int]) -> Routes:
    """The routes of `layers`, given by global number, in that order. Raises RouteError for a layer without routes."""
    at = {layer: i for i, layer in enumerate(routes.layers)}
    lacking = [layer for layer in layers if layer not in at]
    if lacking:
        raise RouteError(f"no routes for layers {lacking}; there are routes for {list(routes.layers)}")
    chosen = [at[layer] for layer in layers]
    return replace(
        routes,
        idx_TLK=np.ascontiguousarray(routes.idx_TLK[:, chosen]),
        layers=tuple(layers),
        holes_TL=None if routes.holes_TL is None else routes.holes_TL[:, chosen],
    )


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
    order, holes_TL = np.argsort(numbers), joined_holes(parts, 1)
    return replace(
        first,
        holes_TL=None if holes_TL is None else holes_TL[:, order],
        idx_TLK=np.ascontiguousarray(np.concatenate([p.idx_TLK for p in parts], axis=1)[:, order]),
        layers=tuple(sorted(numbers)),
    )
