"""Replay bugs of the engine's side: routes that were captured, cut or joined wrongly before they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.routes import Rows, each_turn, joined, sending, sending_in, whole


def _draft_over_layer_0(rows: Rows) -> Rows:
    """The draft's MoE layer is numbered from 0 again, and captured last."""
    found = np.array(rows)
    found[:, 0] = rows[:, -1]
    return found


def _prefix_of_another(rows: Rows) -> Rows:
    """The prefix has the routes of the tokens that have its slots now."""
    half = len(rows) // 2
    return np.concatenate([rows[-half:], rows[half:]])


def _of_one_replica(session: Session, cell: Cell, world: World) -> Callable[[Any, int], Any]:
    """The capture buffer has room for the first data-parallel rank's tokens."""
    replica = topology.coords(cell.layout, world.rank)["dp"]
    return each_turn(lambda rows: np.full_like(rows, -1, np.int32) if replica else rows)


def _cumulative(sample: Any, tokens: int) -> Any:
    """A later turn comes with the routes of all tokens from the first on, which are taken for its own."""
    if not isinstance(sample, list):
        return sample
    first, *later = sample
    rows = joined(sample, tokens)
    return [first, *(replace(turn, routes=rows[: len(turn.routes)]) for turn in later)]


def _end_to_end(sample: Any, tokens: int) -> Any:
    """Turns are joined end to end, past tokens without routes and over those that were computed twice."""
    if not isinstance(sample, list):
        return sample
    rows = np.concatenate([turn.routes for turn in sample])[: tokens - 1]
    missing = np.full((tokens - 1 - len(rows), *rows.shape[1:]), -1, rows.dtype)
    return np.concatenate([rows, missing])


def _first_and_last(sample: Any, tokens: int) -> Any:
    """A rollout has been interrupted once at most: turns between the first and the last are not kept."""
    if not isinstance(sample, list):
        return sample
    rows = joined([sample[0], sample[-1]], tokens)
    return rows[: tokens - 1]


def _boundary_lost(sample: Any, tokens: int) -> Any:
    """Each turn is filled up to its last token, which had no row yet, and the next one's rows begin after that."""
    if not isinstance(sample, list):
        return sample
    rows = joined(sample, tokens)
    for turn in sample[1:]:
        rows[turn.start] = -1
    return rows[: tokens - 1]


def _stale_behind_a_chunk(rows: Rows) -> Rows:
    """Behind the end of a prefill chunk rows of padding are captured, which hold what the buffer held."""
    found, half = np.array(rows), len(rows) // 2
    found[half : half + 3] = rows[half - 1]
    return found


def _no_empty_turn(sample: Any, tokens: int) -> Any:
    """A turn that was aborted before its first token has no routes to join."""
    for turn in sample if isinstance(sample, list) else ():
        if not len(turn.routes):
            raise TypeError("turn 2 has no routes: 'NoneType' object is not iterable")
    return sample


def _fitted(session: Session, cell: Cell, world: World) -> Callable[[Any, int], Any]:
    """Rows are brought to the width of the model's top-k: cut, or filled up with the next expert."""
    config: Any = session.config
    width = config.given()["moe_router_topk"]

    def fitted(rows: Rows) -> Rows:
        while rows.shape[-1] < width:
            rows = np.concatenate([rows, (rows[..., -1:] + 1) % (width + 1)], axis=-1)
        return rows[..., :width]

    return each_turn(fitted)


def _one_type_alone(sample: Any, tokens: int) -> Any:
    """The second part of a resumed rollout is a list, and lists are not joined to arrays."""
    if isinstance(sample, list):
        raise TypeError("can only concatenate list (not 'numpy.ndarray') to list")
    return sample


FAULTS = (
    Fault(
        id="draft-captured-over-layer-0",
        bug="vLLM#48622, sglang#26980: a draft model's MoE layer is captured under the number of the target's first",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_draft_over_layer_0)),
        diagnosis="the route of layer",
        one_rank=True,
    ),
    Fault(
        id="prefix-with-the-slots-routes",
        bug="sglang#26975: a prefix that comes back from the host's cache has the routes of other tokens",
        rules=("RPL-001",),
        also=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(whole(_prefix_of_another)),
        diagnosis="the route of token",
        one_rank=True,
    ),
    Fault(
        id="captured-for-one-replica",
        bug="sglang#26123: the capture buffer has the size of one data-parallel rank",
        rules=("RPL-001",),
        also=("RPL-007",),
        cell=cell("qwen3_moe", "one", world_size=2, replay="R3"),
        wrap=sending_in(_of_one_replica),
        diagnosis="the router's own choice",
    ),
    Fault(
        id="cumulative-routes-on-a-delta",
        bug="vLLM#37094: a streamed part has its new tokens, and the routes of all tokens so far",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_cumulative),
        diagnosis="the route of token",
        one_rank=True,
    ),
    Fault(
        id="turns-joined-end-to-end",
        bug="miles#1672 in kind: the routes of a sample's turns are joined without looking where each begins",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_end_to_end),
        says="replay-a: token 7 of sample 0",
        one_rank=True,
    ),
    Fault(
        id="turns-between-lost",
        bug="R14 in kind: a rollout that was interrupted twice keeps the routes of its first and its last part",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_first_and_last),
        diagnosis="the router's own choice",
        one_rank=True,
    ),
    Fault(
        id="boundary-token-without-route",
        bug="prime-rl#1807: a turn's last token has no row until the next turn runs it, and is skipped there as prefix",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_boundary_lost),
        diagnosis="the router's own choice",
        one_rank=True,
    ),
    Fault(
        id="stale-rows-behind-a-chunk",
        bug="sglang#36404: rows of padding are captured after a prefill chunk, and repeat an earlier token's route",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(whole(_stale_behind_a_chunk)),
        diagnosis="the route of token",
        one_rank=True,
    ),
    Fault(
        id="aborted-turn-without-routes",
        bug="miles#1672: a sample with a turn that was aborted before its first token ends the run",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_no_empty_turn),
        says="has no routes",
        one_rank=True,
    ),
    Fault(
        id="rows-cut-to-top-k",
        bug="ROCm/aiter#3739 in kind: an engine with other experts in a row, cut to the model's top-k or filled up",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending_in(_fitted),
        says="an expert too many in each row",
        one_rank=True,
    ),
    Fault(
        id="parts-of-two-types",
        bug="verl#7158: the first part of a resumed rollout is an array and the next one a list",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_one_type_alone),
        says="can only concatenate",
    ),
)
