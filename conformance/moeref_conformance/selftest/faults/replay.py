"""Replay bugs of state: whose routes a router takes and when, what is left behind, and what carries gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Swapped


def _router_replay() -> Any:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    return RouterReplay


def _fifo_left(rooms: Rooms) -> Iterable[Edit]:
    """Clearing empties all but the queue of the backward passes."""

    def clear_indices(self: Any) -> None:
        self.recorded_topk_idx = self.target_topk_idx = None

    return [Edit(_router_replay(), "clear_indices", clear_indices)]


def _all_chunks_armed(rooms: Rooms) -> Iterable[Edit]:
    controller = rooms["megatron.replay"]
    good = controller._arm

    def arm(walked: Any, targets: Any, chunk: int) -> None:
        for number in range(len(walked)):
            good(walked, targets, number)

    return [Edit(controller, "_arm", arm)]


def _orphans(rooms: Rooms) -> Iterable[Edit]:
    """The model is built twice, and routers are addressed by their place in megatron-core's list of all routers."""
    megatron, controller = rooms["megatron"], rooms["megatron.replay"]
    good = megatron.build

    def build(*args: Any, **kwargs: Any) -> Any:
        good(*args, **kwargs)
        return good(*args, **kwargs)

    def by_place(router: Any) -> Any:
        return _router_replay().global_router_replay_instances[router.layer]

    return [Edit(megatron, "build", build), Edit(controller.Router, "replay", property(by_place))]


def _left_on(rooms: Rooms) -> Iterable[Edit]:
    """After a scope its last routes are replayed in every forward, until another scope begins."""
    controller = rooms["megatron.replay"]
    good = controller._checked

    def disarm(replays: Any) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        for replay in replays:
            if replay.target_topk_idx is not None:
                replay.replay_backward_list = []
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def checked(chunk: Any, **how: Any) -> Any:
        for router in controller.routers(chunk):
            router.replay.clear_router_replay_action()
        return good(chunk, **how)

    return [Edit(controller, "_disarm", disarm), Edit(controller, "_checked", checked)]


def _gate_detached(rooms: Rooms) -> Iterable[Edit]:
    replay = _router_replay()
    good = replay.get_replay_topk

    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, chosen = good(self, *args, **kwargs)
        return (scores if self.router_replay_action is None else scores.detach()), chosen

    return [Edit(replay, "get_replay_topk", get_replay_topk)]


def _scores_of_the_own(rooms: Rooms) -> Iterable[Edit]:
    replay = _router_replay()
    good = replay.get_replay_topk

    def get_replay_topk(
        self: Any,
        scores: Any,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> Any:
        _, chosen = good(self, scores, topk, num_groups, group_topk, default_compute_topk)
        own, _ = default_compute_topk(scores, topk, num_groups, group_topk)
        return own, chosen

    return [Edit(replay, "get_replay_topk", get_replay_topk)]


def _signature_of_old(rooms: Rooms) -> Iterable[Edit]:
    """The router's forward is replaced by one of an earlier version's signature."""
    from megatron.core.transformer.moe.router import TopKRouter

    good = TopKRouter.forward
    return [Edit(TopKRouter, "forward", lambda self, input: good(self, input))]


def _registry_always(rooms: Rooms) -> Iterable[Edit]:
    megatron = rooms["megatron"]
    good = megatron.logits

    def logits(*args: Any) -> Any:
        _router_replay().global_router_replay_instances[0].clear_router_replay_action()
        return good(*args)

    return [Edit(megatron, "logits", logits)]


class _Unmarked:
    """Training steps under routes, with the gate's weight not marked as seeing one run of the tokens alone."""

    def __init__(self, session: Any) -> None:
        self._good, self._export = session.replay, session.export
        self.record, self.replay = self._good.record, self._good.replay

    def step(self, tokens_BS: Any, routes: Any) -> Any:
        with ExitStack() as stack:
            for weight in self._gates():
                stack.enter_context(mock.patch.object(weight, "sequence_parallel", False))
            return self._good.step(tokens_BS, routes)

    def _gates(self) -> Iterator[Any]:
        for chunk in self._export.chunks():
            yield from (p for name, p in chunk.named_parameters() if name.endswith("router.weight"))


def _gate_unmarked(session: Session, cell: Cell, world: World) -> Any:
    return Swapped(session, replay=_Unmarked(session))


FAULTS = (
    Fault(
        id="routes-of-an-earlier-forward",
        bug="R3: SkyRL#1908, routes of a forward without backward are left for the next recomputation",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_fifo_left,
        says="recompute-b: ",
    ),
    Fault(
        id="all-chunks-armed",
        bug="R23: SkyRL 31d6b3c, under VPP every forward gives routes to all chunks of the rank, one uses them",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R2"),
        edits=_all_chunks_armed,
        says="recompute: ",
        diagnosis="of sample",
    ),
    Fault(
        id="routers-by-global-list",
        bug="R11: verl#7340, miles#2570: the routers of a discarded model get the routes",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_orphans,
        diagnosis="the router's own choice",
    ),
    Fault(
        id="replay-left-on",
        bug="B15 in kind: the action is not taken back, and a critic, reference or evaluation is replayed",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_left_on,
        says="native-between: ",
        one_rank=True,
    ),
    Fault(
        id="gate-without-gradient",
        bug="R20: ISEEKYAN/Megatron-LM#79, scores of replayed experts are cut off from the gate",
        rules=("RPL-006",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_gate_detached,
        says="the gate 0:decoder.layers.0.mlp.router.weight has no gradient",
    ),
    Fault(
        id="scores-of-the-own-choice",
        bug="the weights of the router's own experts are given to the replayed ones",
        rules=("RPL-004",),
        also=("RPL-003",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_scores_of_the_own,
        says="off transformers' under the same routes",
        one_rank=True,
    ),
    Fault(
        id="router-of-an-earlier-signature",
        bug="R19: verl#5155, a router patched for replay lacks padding_mask",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        edits=_signature_of_old,
        says="positional arguments",
    ),
    Fault(
        id="registry-asked-always",
        bug="R21: verl#7106, an empty list of routers ends a run without replay",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one"),
        edits=_registry_always,
        says="list index out of range",
    ),
    Fault(
        id="gate-not-summed-over-tp",
        bug="a gate patched for replay without the mark that sums its gradient over TP",
        rules=("RPL-008",),
        cell=cell("qwen3_moe", "tp2", replay="R3"),
        wrap=_gate_unmarked,
        says="router.weight",
    ),
)
