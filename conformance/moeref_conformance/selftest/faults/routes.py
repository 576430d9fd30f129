"""Replay bugs of alignment: routers take the routes of other layers, rows or experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Session, Turn, World
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.context import zigzag

#: Routes of one sample, integers [rows, layers, top-k]; a row of -1 is left to the router.
Rows = np.ndarray[Any, Any]
Wrap = Callable[[Session, Cell, World], Any]


def sending(change: Callable[[Any, int], Any]) -> Wrap:
    """The good session is given `change(sample, tokens)` in place of every sample's routes."""
    return sending_in(lambda session, cell, world: change)


def sending_in(made: Callable[[Session, Cell, World], Callable[[Any, int], Any]]) -> Wrap:
    """As `sending`, with a change that depends on the session, the cell and the rank."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.replay
        change = made(session, cell, world)

        def given(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
            return routes and [change(sample, tokens_BS.shape[1]) for sample in routes]

        return facet(
            session,
            "replay",
            replay=lambda tokens_BS, routes: good.replay(tokens_BS, given(tokens_BS, routes)),
            step=lambda tokens_BS, routes: good.step(tokens_BS, given(tokens_BS, routes)),
        )

    return wrap


def each_turn(change: Callable[[Rows], Rows]) -> Callable[[Any, int], Any]:
    """`change` for the routes of a sample, or of each of its turns."""

    def of_sample(sample: Any, tokens: int) -> Any:
        if isinstance(sample, list):
            return [replace(turn, routes=change(turn.routes)) for turn in sample]
        return change(sample)

    return of_sample


def whole(change: Callable[[Rows], Rows]) -> Callable[[Any, int], Any]:
    """`change` for the routes of a whole sample, which has a row for every token: turns joined, missing rows -1.

    A sample of another length stays as it is, for the good session to refuse.
    """

    def of_sample(sample: Any, tokens: int) -> Any:
        rows = joined(sample, tokens) if isinstance(sample, list) else np.array(sample, np.int32)
        if len(rows) == tokens - 1:
            rows = np.concatenate([rows, np.full_like(rows[:1], -1)])
        return change(rows)[: tokens - 1] if len(rows) == tokens else sample

    return of_sample


def joined(turns: Sequence[Turn], tokens: int) -> Rows:
    """The turns joined, a row for every token. Where turns overlap, the earlier one counts."""
    rows = np.full((tokens, *turns[0].routes.shape[1:]), -1, np.int32)
    for turn in reversed(turns):
        rows[turn.start : turn.start + len(turn.routes)] = turn.routes
    return rows


def _by_ordinal(session: Session, cell: Cell, world: World) -> Callable[[Any, int], Any]:
    """Each router indexes the routes of all layers with its number among the routers."""
    config: Any = session.config
    layers = [layer for layer, moe in enumerate(config.given()["moe_layer_freq"]) if moe]

    def shifted(rows: Rows) -> Rows:
        found, given = np.array(rows), rows[:, -1, 0] >= 0
        found[:, layers] = rows[:, : len(layers)]
        found[given, layers[0]] = np.arange(rows.shape[2])  # zeros, from a dense layer, made legal
        return found

    return each_turn(shifted)


def _neighbours(session: Session, cell: Cell, world: World) -> Callable[[Any, int], Any]:
    """The chunks of a rank are taken to have consecutive layers."""
    layout, stage = cell.layout, topology.coords(cell.layout, world.rank)["pp"]
    each = cell.layers // (layout.pp * layout.vpp)
    mine = [(vp * layout.pp + stage) * each + i for vp in range(layout.vpp) for i in range(each)]
    run = [stage * layout.vpp * each + i for i in range(len(mine))]

    def moved(rows: Rows) -> Rows:
        found = np.array(rows)
        found[:, mine] = rows[:, run]
        return found

    return each_turn(moved)


def in_runs(session: Session, cell: Cell, world: World) -> Callable[[Any, int], Any]:
    """Each CP rank takes one contiguous run of the rows as those at its zigzag positions."""

    def moved(rows: Rows) -> Rows:
        found = np.empty_like(rows)
        found[zigzag(len(rows), cell.layout.cp).numpy()] = rows
        return found

    return whole(moved)


def _of_the_first_tp_rank(session: Session, cell: Cell, world: World) -> Callable[[Any, int], Any]:
    """Each TP rank takes the routes of the first TP rank's rows."""
    tp = cell.layout.tp
    return whole(lambda rows: np.tile(rows[: len(rows) // tp], (tp, 1, 1)))


def _all_or_none(sample: Any, tokens: int) -> Any:
    """If one row has no route, no row of the sample is replayed."""
    return sample if isinstance(sample, list) or np.min(sample) >= 0 else np.full_like(sample, -1)


def _has_none(sample: Any) -> bool:
    """Whether no token of a sample has a route."""
    return not isinstance(sample, list) and bool(np.size(sample)) and np.max(sample) < 0


def _none_made_up(sample: Any, tokens: int) -> Any:
    """A sample without any route is given the first experts, so that it has the shape of the others."""
    return _to_the_first(np.array(sample)) if _has_none(sample) else sample


def _by_the_first(session: Session, cell: Cell, world: World) -> Any:
    """In a training step the first sample of a microbatch says whether this has routes."""
    good: Any = session.replay

    def step(tokens_BS: Any, routes: Sequence[Any]) -> Any:
        firsts = [number - number % cell.rows for number in range(len(routes))]
        none = [_has_none(routes[first]) for first in firsts]
        return good.step(tokens_BS, [np.full_like(of, -1) if no else of for of, no in zip(routes, none, strict=True)])

    return facet(session, "replay", step=step)


def _last_repeated(sample: Any, tokens: int) -> Any:
    """The last token, which has no route, is given that of the token before."""
    rows = joined(sample, tokens) if isinstance(sample, list) else np.array(sample)
    if len(rows) == tokens - 1:
        rows = np.concatenate([rows, rows[-1:]])
    if len(rows) != tokens:
        return sample
    rows[-1] = rows[-2]
    return rows


def _last_turn_alone(sample: Any, tokens: int) -> Any:
    """Of a resumed rollout only the rows of the last turn are kept."""
    return joined(sample[-1:], tokens)[: tokens - 1] if isinstance(sample, list) else sample


def later_turns_hold(sample: Any, tokens: int = 0) -> Any:
    """Rows that the resumed engine recomputed replace those of the sampled tokens."""
    return joined(sample[::-1], _rows(sample)) if isinstance(sample, list) else sample


def in_one(sample: Any) -> Any:
    """The routes of a sample as one array, also of one that comes in turns."""
    return joined(sample, _rows(sample)) if isinstance(sample, list) else sample


def _rows(turns: Sequence[Turn]) -> int:
    return max(turn.start + len(turn.routes) for turn in turns)


def _later_turns_hold_in_steps(session: Session, cell: Cell, world: World) -> Any:
    """The same in training steps alone."""
    good: Any = session.replay

    def step(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        return good.step(tokens_BS, routes and [later_turns_hold(sample) for sample in routes])

    return facet(session, "replay", step=step)


def _to_the_first(rows: Rows) -> Rows:
    return np.where(rows < 0, np.arange(rows.shape[2], dtype=rows.dtype), rows)


def _wraps(rows: Rows) -> Rows:
    return np.where(rows < 0, rows, rows.astype(np.uint8))


def _wraps_in_16(rows: Rows) -> Rows:
    return np.where(rows < 0, rows, rows.astype(np.int16))


def _negatives_wrap(rows: Rows) -> Rows:
    """Of negative numbers -1 is a mark; the others are taken as the bytes that they were."""
    return np.where(rows < -1, rows.astype(np.int32) % 256, rows)


def _padded_on_the_left(sample: Any, tokens: int) -> Any:
    """Rows are filled up to a multiple of 8 before the first, and read from there."""
    rows, more = joined(sample, tokens) if isinstance(sample, list) else sample, -tokens % 8
    return np.concatenate([np.full_like(rows[:more], -1, np.int32), rows])[: len(rows)] if more else sample


def _first_experts_are_padding(rows: Rows) -> Rows:
    """A row with the first experts in all layers is taken for one of padding, which is given these."""
    routed_L = rows.any((0, 2))
    first_T = (rows[:, routed_L] == np.arange(rows.shape[2])).all((1, 2))
    return np.where(first_T[:, None, None], -1, rows.astype(np.int32))


def _repeated_rows_dropped(rows: Rows) -> Rows:
    """A row that is as the one before it is taken for one that was sent twice."""
    twice_T = (rows[1:] == rows[:-1]).all((1, 2))
    kept = rows[np.append(True, ~twice_T)]
    return np.concatenate([kept, np.full((twice_T.sum(), *rows.shape[1:]), -1, np.int32)])


def _begins_at_the_first_route(rows: Rows) -> Rows:
    """Rows without a route before the first one that has one are taken for padding on the left, and cut off."""
    begin = int((rows[:, -1, 0] >= 0).argmax())
    return np.roll(rows, -begin, 0)


def _from_the_start_again(sample: Any, tokens: int) -> Any:
    """A turn that begins at the first token is taken for a new rollout."""
    if not isinstance(sample, list):
        return sample
    return sample[max(number for number, turn in enumerate(sample) if turn.start == 0) :]


def _refused_in_forwards_alone(session: Session, cell: Cell, world: World) -> Any:
    """In a step rows past the last token are cut off, where a forward refuses them."""
    good: Any = session.replay

    def step(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        return good.step(tokens_BS, routes and [_surplus_cut(sample, tokens_BS.shape[1]) for sample in routes])

    return facet(session, "replay", step=step)


def _next_expert(rows: Rows) -> Rows:
    """A repeated expert in a row of the last layer is replaced by another one."""
    found = np.array(rows)
    for row_K in found[:, -1]:
        for place in range(1, len(row_K) if row_K[0] >= 0 else 0):
            while row_K[place] in row_K[:place]:
                row_K[place] = (row_K[place] + 1) % (len(row_K) + 1)
    return found


def _rows_made_up(sample: Any, tokens: int) -> Any:
    """The number of elements, not of rows, is compared with the tokens; missing rows are filled up with -1."""
    if isinstance(sample, list) or sample.size < tokens:
        return sample
    return np.concatenate([sample, np.full((tokens - 1 - len(sample), *sample.shape[1:]), -1, np.int32)])


def _surplus_cut(sample: Any, tokens: int) -> Any:
    """Rows past the last token are cut off, whatever they belong to."""
    return sample if isinstance(sample, list) else sample[: tokens - 1]


def _recorded_as_sets(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Megatron's routers record the experts of each token in ascending order."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    good = RouterReplay.record_indices

    def record_indices(self: Any, idx_TK: Any) -> None:
        good(self, idx_TK.sort(dim=1).values)

    return mock.patch.object(RouterReplay, "record_indices", record_indices)


def _none_between(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """On stages that are neither the first one nor the last, which have no batch and no routes, routers choose."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    good, inner = RouterReplay.get_replay_topk, topology.inner_stage(cell.layout, world.rank)

    def get_replay_topk(
        self: Any, scores: Any, topk: int, num_groups: Any = None, group_topk: Any = None, own: Any = None, **named: Any
    ) -> Any:
        own = named.get("default_compute_topk", own)
        given = good(self, scores, topk, num_groups, group_topk, own)
        return own(scores, topk, num_groups, group_topk) if inner else given

    return mock.patch.object(RouterReplay, "get_replay_topk", get_replay_topk)


def _compared_in_torch(routes_TLK: Rows) -> Rows:
    """Rows that are missing are looked for by torch, in the dtype in which routes came."""
    given_TLK = torch.from_numpy(routes_TLK.copy())
    taken_TLK: Rows = torch.where(given_TLK < 0, -1, given_TLK.long()).numpy()
    return taken_TLK


def _any_negative(routes_TLK: Rows) -> Rows:
    """A row counts as missing if one of its experts is negative, as of an engine's rank that has not all experts."""
    return np.where((routes_TLK < 0).any(-1, keepdims=True), -1, routes_TLK.astype(np.int32))


def _dense_layers_first(routes_TLK: Rows) -> Rows:
    """Columns of the MoE layers alone, by the number of a layer less that of all dense layers."""
    moe = [layer for layer in range(routes_TLK.shape[1]) if routes_TLK[:, layer].any()]
    dense, taken_TLK = routes_TLK.shape[1] - len(moe), routes_TLK.copy()
    for layer in moe:
        taken_TLK[:, layer] = routes_TLK[:, moe][:, layer - dense]
    return taken_TLK


FAULTS = (
    Fault(
        id="one-negative-expert-a-missing-row",
        bug="sglang#9499 in kind: experts of other ranks are -1 in a route, and the token is routed anew",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_any_negative)),
        says="a negative expert among others",
    ),
    Fault(
        id="uint16-compared-in-torch",
        bug="R12 NeMo-RL#4240: routes of many experts come as uint16, for which torch lacks kernels",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_compared_in_torch)),
        says="not implemented for 'UInt16'",
    ),
    Fault(
        id="dense-layers-taken-for-a-prefix",
        bug="verl#5452 in kind: all dense layers are taken off a layer's number, as if they came before it",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", layers=3, replay="R3", batch="pairs"),
        wrap=sending(each_turn(_dense_layers_first)),
        diagnosis="the route of layer 2 (layer +2)",
    ),
    Fault(
        id="routes-by-ordinal",
        bug="R1: verl#5037, routes of all layers are indexed by the number of the router: dense layers shift them",
        rules=("RPL-001",),
        also=("RPL-007",),
        cell=cell("glm4_moe", "one", layers=3, replay="R3"),
        wrap=sending_in(_by_ordinal),
        diagnosis="the route of layer 1 (layer -1)",
    ),
    Fault(
        id="no-routes-between-stages",
        bug="Megatron-Bridge#3926 in kind: what comes with a batch, routes too, gets to the first and the last stage",
        rules=("RPL-001",),
        also=("LGP-004",),
        cell=cell("qwen3_moe", "pp4", layers=4, replay="R3"),
        patch=_none_between,
        diagnosis="the router's own choice",
    ),
    Fault(
        id="chunks-taken-for-neighbours",
        bug="R2: verl#5452, R16: ms-swift, the chunks of a rank under VPP are taken for neighbouring layers",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R3"),
        wrap=sending_in(_neighbours),
        diagnosis="the route of layer",
    ),
    Fault(
        id="routes-cut-in-runs",
        bug="routes are cut over CP in runs, tokens zigzag",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "cp2", replay="R3"),
        wrap=sending_in(in_runs),
        diagnosis="the route of token",
    ),
    Fault(
        id="routes-of-the-first-tp-rank",
        bug="R6: miles#551, rows are laid out for DP and not for TP: every TP rank takes those of the first",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "tp2", replay="R3"),
        wrap=sending_in(_of_the_first_tp_rank),
        diagnosis="the route of token",
    ),
    Fault(
        id="one-row-missing-all-native",
        bug="R7: miles#645, any -1 disables replay for the whole call",
        rules=("RPL-001",),
        also=("RPL-007",),  # a route with one negative expert passes for a missing one
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_all_or_none),
        diagnosis="the router's own choice",
    ),
    Fault(
        id="sample-without-routes-all-native",
        bug="NVIDIA-NeMo/labs-molt#5: the first sample of a microbatch has no routes, and those of the others are lost",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", batch="pairs", replay="R3"),
        wrap=_by_the_first,
        says="recompute-b: token 0 of sample 3",
        diagnosis="the router's own choice",
        one_rank=True,
    ),
    Fault(
        id="sample-without-routes-to-the-first-experts",
        bug="verl-project/uni-agent#57: a sample without routes is given zeros, as they fit those of other samples",
        rules=("RPL-003",),
        also=("RPL-009",),  # its last token chooses otherwise behind a layer with other experts
        cell=cell("qwen3_moe", "one", batch="pairs", replay="R3"),
        wrap=sending(_none_made_up),
        says="recompute-b: token 0 of sample 2",
        diagnosis="the first experts",
        one_rank=True,
    ),
    Fault(
        id="resumed-routes-replace",
        bug="R14: verl#6046, miles#3277, the routes of a resumed rollout take the place of all earlier ones",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_last_turn_alone),
        says="replay-a: token 0 of sample 0",
        diagnosis="the router's own choice",
        one_rank=True,
    ),
    Fault(
        id="resumed-routes-overwrite",
        bug="R14 in kind: rows that were recomputed when a rollout was resumed overwrite those of the sampled tokens",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(later_turns_hold),
        says="replay-a: token 5 of sample 0",
        one_rank=True,
        diagnosis="the routes of set b: of another forward or turn",
    ),
    Fault(
        id="resumed-routes-overwrite-in-steps",
        bug="R14 in kind: forwards join the turns of a rollout, and steps take what was computed last",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_later_turns_hold_in_steps,
        says="step-a: token 5 of sample 0",
        one_rank=True,
        diagnosis="the routes of set b: of another forward or turn",
    ),
    Fault(
        id="missing-rows-to-the-first-experts",
        bug="R5: verl#7524, rows without a route go to the first experts",
        rules=("RPL-003",),
        also=("RPL-004", "RPL-007"),  # a route with one negative expert passes for a missing one
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_to_the_first)),
        diagnosis="the first experts",
        one_rank=True,
    ),
    Fault(
        id="last-route-repeated",
        bug="slime, SkyRL in kind: the last token is given a route that the engine did not send",
        rules=("RPL-009",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_last_repeated),
        diagnosis="the route of token",
        one_rank=True,
    ),
    Fault(
        id="experts-wrap",
        bug="R12: prime-rl#3051, ms-swift: experts are cast to uint8, where 256 becomes 0",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_wraps)),
        says="wraps",
    ),
    Fault(
        id="experts-wrap-in-16-bits",
        bug="prime-rl#3350 in kind: routes are packed into the smallest type, here int16, before they are looked at",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_wraps_in_16)),
        says="wraps to one in 16 bits",
    ),
    Fault(
        id="negative-experts-wrap",
        bug="R12 in kind: negative experts are taken for bytes that were read with a sign",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_negatives_wrap)),
        says="a negative expert that wraps",
    ),
    Fault(
        id="routes-padded-on-the-left",
        bug="slime#1052, R6 in kind: routes of a sequence whose length is no multiple are padded at the other end",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_padded_on_the_left),
        says="shorter-a: ",
        one_rank=True,
    ),
    Fault(
        id="first-experts-taken-for-padding",
        bug="SkyRL#2091 in kind: padding is given the first experts, and a token with these is taken for padding",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(each_turn(_first_experts_are_padding)),
        diagnosis="the router's own choice",
        one_rank=True,
    ),
    Fault(
        id="repeated-rows-dropped",
        bug="reported nowhere: rows that an engine computed twice are found by their content where turns are joined",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(whole(_repeated_rows_dropped)),
        diagnosis="the route of token",
        one_rank=True,
    ),
    Fault(
        id="begins-at-the-first-route",
        bug="vLLM#57966 in kind: the rows of a prefix are left out, and the others taken for those of the first tokens",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(whole(_begins_at_the_first_route)),
        diagnosis="the route of token",
        one_rank=True,
    ),
    Fault(
        id="turn-from-the-start-replaces",
        bug="verl#6029: a resumed rollout comes with routes of all its tokens, which replace those of the sampled ones",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_from_the_start_again),
        says="shorter-a: token 0 of sample 0",
        one_rank=True,
        diagnosis="the routes of set b: of another forward or turn",
    ),
    Fault(
        id="refused-in-forwards-alone",
        bug="verl#7261 in kind: two paths prepare routes, and that of the training step looks at nothing",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_refused_in_forwards_alone,
        says="three rows too many in a step",
    ),
    Fault(
        id="expert-twice-let-through",
        bug="R4: verl#4986, an expert twice in a row: the all-to-all counts T·k routes, the map has fewer",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3", dispatcher="allgather"),
        wrap=sending(each_turn(_next_expert)),
        says="twice in a row",
    ),
    Fault(
        id="rows-made-up",
        bug="R10: verl#7261, the number of elements is compared with the length, so that rows may lack",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_rows_made_up),
        says="three rows too few",
    ),
    Fault(
        id="surplus-rows-cut",
        bug="R14 in kind, miles#1069: routes of a sequence that was longer are cut to the length of this one",
        rules=("RPL-007",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=sending(_surplus_cut),
        says="three rows too many",
    ),
    Fault(
        id="routes-kept-as-sets",
        bug="recorded routes are sorted: sums over a token's experts are taken in another order",
        rules=("RPL-005",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        patch=_recorded_as_sets,
        says="off the recorded ones",
    ),
)
