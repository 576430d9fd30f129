"""Routing replay: routes, their payload, their alignment with tokens, layers and ranks, and mismatch metrics."""

from moeref.replay.align import (
    from_tokens,
    join_turns,
    merge_layers,
    pad,
    select_layers,
    stage_layers,
    to_tokens,
    truncate,
    unpad,
)
from moeref.replay.engine_formats import Spec, from_engine
from moeref.replay.metrics import Agreement, Mismatch, agreement, mismatch
from moeref.replay.microbatch import (
    MicrobatchRoutes,
    batched,
    gather_ranks,
    marked,
    packed,
    rank_rows,
    shard_to_rank,
    targets,
)
from moeref.replay.payload import read, write
from moeref.replay.routes import (
    GIVEN,
    MISSING,
    PAD,
    RouteError,
    Routes,
    concat,
    index_dtype,
    missing_rows,
    routes,
    spread_experts,
)
from moeref.replay.trace import Coverage, Trace

__all__ = [
    "GIVEN",
    "MISSING",
    "PAD",
    "Agreement",
    "Coverage",
    "MicrobatchRoutes",
    "Mismatch",
    "RouteError",
    "Routes",
    "Spec",
    "Trace",
    "agreement",
    "batched",
    "concat",
    "from_engine",
    "from_tokens",
    "gather_ranks",
    "index_dtype",
    "join_turns",
    "marked",
    "merge_layers",
    "mismatch",
    "missing_rows",
    "packed",
    "pad",
    "rank_rows",
    "read",
    "routes",
    "select_layers",
    "shard_to_rank",
    "spread_experts",
    "stage_layers",
    "targets",
    "to_tokens",
    "truncate",
    "unpad",
    "write",
]
