"""Replay bugs of state: routes of another forward or model, replay that is left on, gradients that are cut off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Swapped, facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.megatron_replay import RouterReplayFacet


def _router_replay() -> Any:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    return RouterReplay


def _router_replay_with(name: str, made: Callable[[Any], Any]) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """A fault's `patch`: method `name` of megatron-core's RouterReplay is replaced by `made(original)`."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        kind = _router_replay()
        return mock.patch.object(kind, name, made(getattr(kind, name)))

    return patch


def _backward_list_kept(good: Any) -> Any:
    """Clearing does not empty the queue of the backward passes."""

    def clear_indices(self: Any) -> None:
        self.recorded_topk_idx = self.target_topk_idx = None

    return clear_indices


def _action_of_the_discarded(good: Any) -> Any:
    """The model was built twice, and actions go to the routers of the first one, which no longer runs."""
    discarded: dict[int, Any] = {}

    def set_router_replay_action(self: Any, action: Any) -> None:
        good(discarded.setdefault(id(self), copy.copy(self)), action)

    return set_router_replay_action


def _scores_detached(good: Any) -> Any:
    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, chosen = good(self, *args, **kwargs)
        return (scores if self.router_replay_action is None else scores.detach()), chosen

    return get_replay_topk


def _scores_normalised_again(good: Any) -> Any:
    """Scores of replayed experts are made to sum to 1, though the model's are not."""

    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, chosen = good(self, *args, **kwargs)
        replayed = self.router_replay_action and self.router_replay_action.name != "RECORD"
        return (scores / scores.sum(-1, keepdim=True) if replayed else scores), chosen

    return get_replay_topk


def _scores_of_the_own(good: Any) -> Any:
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

    return get_replay_topk


def _scores_of_the_own_in_the_backward(good: Any) -> Any:
    own = _scores_of_the_own(good)

    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        action = self.router_replay_action
        chosen = own if action and action.name == "REPLAY_BACKWARD" else good
        return chosen(self, *args, **kwargs)

    return get_replay_topk


def _scores_of_the_recorded(good: Any) -> Any:
    """Scores of the replayed experts are those of the recorded forward, with the gradient of the router's own."""
    recorded: dict[int, list[Any]] = {}
    before: dict[int, Any] = {}

    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        action = self.router_replay_action
        scores, chosen = good(self, *args, **kwargs)
        last, kept = before.get(id(self)), recorded.setdefault(id(self), [])
        before[id(self)] = action
        match action and action.name:
            case "RECORD":
                kept[:] = [*(kept if last == action else ()), scores.detach()]
            case "REPLAY_FORWARD":
                kept.append(kept.pop(0))  # a step may run the microbatches of the recorded forward again
                scores = kept[-1] + scores - scores.detach()
        return scores, chosen

    return get_replay_topk


def _signature_of_old(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """The router's forward is replaced by one with an earlier version's signature."""
    from megatron.core.transformer.moe.router import TopKRouter

    good = TopKRouter.forward
    return mock.patch.object(TopKRouter, "forward", lambda self, input: good(self, input))


def _all_chunks_armed(session: Session, cell: Cell, world: World) -> Any:
    """megatron-core's global calls, which reach the routers of all chunks of a rank."""
    return Swapped(session, replay=RouterReplayFacet(session))


def replaying_left(session: Session, left: list[Any]) -> Any:
    """The session, whose forwards replay the routes of one sample for all, where `left` has any."""
    replaying: Any = session.replay
    native: Any = session.forward

    def logits(tokens_BS: Any) -> Any:
        return replaying.replay(tokens_BS, left * len(tokens_BS)) if left else native.logits(tokens_BS)

    return facet(session, "forward", logits=logits)


def _left_on(session: Session, cell: Cell, world: World) -> Any:
    """After a forward under routes, its last routes are replayed in every later forward."""
    replaying: Any = session.replay
    left: list[Any] = []

    def replay(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        logits_BSV = replaying.replay(tokens_BS, routes)
        left[:] = left or (routes[-1:] if routes else [])
        return logits_BSV

    return facet(replaying_left(session, left), "replay", replay=replay)


def _chosen_as_recorded(session: Session, cell: Cell, world: World) -> Any:
    """Once routes are recorded, forwards choose experts by the router weights of that time."""
    export: Any = session.export
    replaying: Any = session.replay
    native: Any = session.forward
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def record(tokens_BS: Any) -> Any:
        named = (one for chunk in export.chunks() for one in chunk.named_parameters())
        kept.update({of: of.detach().clone() for name, of in named if name.endswith("router.weight")})
        return replaying.record(tokens_BS)

    def logits(tokens_BS: Any) -> Any:
        now = {of: of.detach().clone() for of in kept}
        with torch.no_grad():
            for of, then in kept.items():
                of.copy_(then)
            try:
                return native.logits(tokens_BS)
            finally:
                for of, held in now.items():
                    of.copy_(held)

    return facet(facet(session, "replay", record=record), "forward", logits=logits)


def _recorded_once(session: Session, cell: Cell, world: World) -> Any:
    """The first forward that records does so; later ones are replayed, and their routes are those that are kept."""
    good: Any = session.replay
    recorded: list[bool] = []

    def record(tokens_BS: Any) -> Any:
        if recorded:
            return good.replay(tokens_BS, None)
        recorded.append(True)
        return good.record(tokens_BS)

    return facet(session, "replay", record=record)


def _left_on_by_logprobs(session: Session, cell: Cell, world: World) -> Any:
    """After logprobs under routes the last of these are replayed in forwards, until others are given."""
    replaying: Any = session.replay
    asked: Any = session.logprobs
    left: list[Any] = []

    def logprobs(tokens_BS: Any, temperature: float, routes: Sequence[Any] | None = None) -> Any:
        left[:] = routes[-1:] if routes else []
        return asked.logprobs(tokens_BS, temperature, routes)

    def replay(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        left.clear()
        return replaying.replay(tokens_BS, routes)

    return facet(facet(replaying_left(session, left), "logprobs", logprobs=logprobs), "replay", replay=replay)


def _left_on_by_an_error(session: Session, cell: Cell, world: World) -> Any:
    """The action is taken back after a forward, and not where one raises: the last routes are replayed on."""
    replaying: Any = session.replay
    last: list[Any] = []
    left: list[Any] = []

    def replay(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        try:
            logits_BSV = replaying.replay(tokens_BS, routes)
        except Exception:
            left[:] = last
            raise
        last[:] = last or (routes[-1:] if routes else [])
        return logits_BSV

    return facet(replaying_left(session, left), "replay", replay=replay)


def _registry_always(session: Session, cell: Cell, world: World) -> Any:
    """Every forward looks for the first router that can be replayed."""
    good: Any = session.forward

    def logits(tokens_BS: Any) -> Any:
        _router_replay().global_router_replay_instances[0].clear_router_replay_action()
        return good.logits(tokens_BS)

    return facet(session, "forward", logits=logits)


def _gate_unmarked(session: Session, cell: Cell, world: World) -> Any:
    """In steps under routes the gate's weight is not marked `sequence_parallel`: its gradient is not summed over TP."""
    good: Any = session.replay
    chunks: Any = session.export.chunks() if session.export else ()
    gates = [p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith("router.weight")]

    def step(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        with ExitStack() as stack:
            for weight in gates:
                stack.enter_context(mock.patch.object(weight, "sequence_parallel", False))
            return good.step(tokens_BS, routes)

    return facet(session, "replay", step=step)


def _own_choice_in_the_backward(good: Any) -> Any:
    def get_replay_topk(
        self: Any,
        scores: Any,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> Any:
        found = good(self, scores, topk, num_groups, group_topk, default_compute_topk)
        if self.router_replay_action.name != "REPLAY_BACKWARD":
            return found
        return default_compute_topk(scores, topk, num_groups, group_topk)

    return get_replay_topk


def _whole_layers_alone(session: Session, cell: Cell, world: World) -> Any:
    """Recomputed forwards are replayed where whole layers are recomputed, and not where MoE layers alone are."""
    good: Any = session.replay
    patch = _router_replay_with("get_replay_topk", _own_choice_in_the_backward)

    def step(tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        selective = session.export.chunks()[0].config.recompute_granularity == "selective"  # type: ignore[union-attr]
        with patch(cell, world) if selective else nullcontext():
            return good.step(tokens_BS, routes)

    return facet(session, "replay", step=step)


def _in_the_policy(name: str, made: Callable[[Any], Any]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: method `name` of RouterReplay is replaced in steps with a policy's loss alone."""
    patch = _router_replay_with(name, made)

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.policy

        def policy_gradients(*given: Any) -> Any:
            with patch(cell, world):
                return good.policy_gradients(*given)

        return facet(session, "policy", policy_gradients=policy_gradients)

    return wrap


def _routes_of_replica_0(session: Session, cell: Cell, world: World) -> Any:
    """In a training step the routes of the first data-parallel replica are sent to all, whose rows are others."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    good: Any = session.replay

    def step(tokens_BS: Any, routes: Any) -> Any:
        shared, group = [routes], parallel_state.get_data_parallel_group()
        dist.broadcast_object_list(shared, dist.get_process_group_ranks(group)[0], group)
        return good.step(tokens_BS, shared[0])

    return facet(session, "replay", step=step)


def _ring_of_microbatches(session: Session, cell: Cell, world: World) -> Any:
    """Routes are kept for as many microbatches as there are stages; later ones take those of earlier ones."""
    good: Any = session.replay
    kept = cell.layout.pp * cell.rows

    def step(tokens_BS: Any, routes: Any) -> Any:
        return good.step(tokens_BS, routes and [routes[number % kept] for number in range(len(routes))])

    return facet(session, "replay", step=step)


def _scaled(method: str, change: Callable[[Any], Any]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: what a method of the facet `replay` gives passes through `change`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good = getattr(session.replay, method)
        return facet(session, "replay", **{method: lambda tokens_BS, routes: change(good(tokens_BS, routes))})

    return wrap


def _divided(session: Session, cell: Cell, world: World) -> Any:
    """Logits of forwards that record and of those that are replayed are divided by a temperature, others are not."""
    good: Any = session.replay

    def divided(logits_BSV: torch.Tensor | None) -> torch.Tensor | None:
        return None if logits_BSV is None else logits_BSV / 0.7

    return facet(
        session,
        "replay",
        record=lambda tokens_BS: divided(good.record(tokens_BS)),
        replay=lambda tokens_BS, routes: divided(good.replay(tokens_BS, routes)),
    )


def _patched_by_the_first_replay(session: Session, cell: Cell, world: World) -> Any:
    """The first replay exchanges the routers' code, which weighs experts otherwise where nothing is replayed."""
    good: Any = session.replay
    native: Any = session.forward
    patched: list[bool] = []
    patch = _router_replay_with("get_replay_topk", _unscaled)

    def replay(*given: Any) -> Any:
        patched.append(True)
        return good.replay(*given)

    def logits(tokens_BS: Any) -> Any:
        with patch(cell, world) if patched else nullcontext():
            return native.logits(tokens_BS)

    return facet(facet(session, "replay", replay=replay), "forward", logits=logits)


def _unscaled(good: Any) -> Any:
    def get_replay_topk(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, chosen = good(self, *args, **kwargs)
        return scores / 2, chosen

    return get_replay_topk


def _one_router_scaled(gradients: Any) -> Any:
    of = next(key for key in gradients if key[1].endswith("layers.1.mlp.router.weight"))
    return {**gradients, of: 1.5 * gradients[of]}


def _without_logits(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.replay

    def replay(*given: Any) -> None:
        good.replay(*given)

    return facet(session, "replay", replay=replay)


def _without_gates(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.replay

    def step(*given: Any) -> dict[tuple[int, str], Any]:
        found = good.step(*given)
        return {key: gradient for key, gradient in found.items() if not key[1].endswith("router.weight")}

    return facet(session, "replay", step=step)


def _recorded_elsewhere(session: Session, cell: Cell, world: World) -> Any:
    """The experts that run the recorded forward are other modules than those of the session: no hook is called."""
    good: Any = session.replay
    real = torch.nn.Module.__call__

    def call(self: Any, *args: Any, **named: Any) -> Any:
        of_experts = hasattr(self, "experts") or hasattr(self, "local_experts")
        return self.forward(*args, **named) if of_experts else real(self, *args, **named)

    def record(tokens_BS: Any) -> Any:
        with mock.patch.object(torch.nn.Module, "__call__", call):
            return good.record(tokens_BS)

    return facet(session, "replay", record=record)


def _added_in_bf16(part: str = "") -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: the gradients of parameters whose name has `part` are added up in the dtype of the weights.

    They are turned to fp32 at the end.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.replay

        def step(tokens_BS: torch.Tensor, routes: Sequence[Any]) -> Any:
            whole = good.step(tokens_BS, routes)  # which refuses malformed routes
            alone = [good.step(tokens_BS[row : row + 1], routes[row : row + 1]) for row in range(len(tokens_BS))]
            share = torch.tensor(1 / len(alone))
            parts = {key: [one[key].mul(share).bfloat16() for one in alone] for key in whole if part in key[1]}
            return {**whole, **{key: sum(of[1:], of[0]).float() for key, of in parts.items()}}

        return facet(session, "replay", step=step)

    return wrap


def _reduced_in_bf16(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Gradients of all but experts go over replicas in bf16, and into buffers in fp32."""
    from megatron.core.distributed import DistributedDataParallel

    good = DistributedDataParallel.finish_grad_sync

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        held = [of for of in self.module.parameters() if getattr(of, "allreduce", True)]

        def rounded() -> None:
            for of in held:
                of.main_grad.copy_(of.main_grad.bfloat16())

        rounded()
        good(self, *args, **kwargs)
        rounded()

    return mock.patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def _forward_after_a_step(session: Any, cell: Cell, world: World) -> Any:
    """A replayed forward that follows a replayed step has the routes of that step."""
    good: Any = session.replay
    kept: list[Any] = []

    def step(tokens_BS: torch.Tensor, routes: Any) -> Any:
        kept[:] = routes
        return good.step(tokens_BS, routes)

    def replay(tokens_BS: torch.Tensor, routes: Any) -> Any:
        left, kept[:] = list(kept), []
        return good.replay(tokens_BS, left if len(left) == len(routes) else routes)

    return facet(session, "replay", step=step, replay=replay)


FAULTS = (
    Fault(
        id="routes-of-a-step-in-the-next-forward",
        bug="SkyRL#1908 the other way round: routes of a training step are left, and the next forward has them",
        rules=("RPL-001",),
        cell=cell("glm4_moe", "one", layers=3, replay="R3"),
        wrap=_forward_after_a_step,
        says="again-a: ",
        diagnosis="the routes of set b: of another forward or turn",
    ),
    Fault(
        id="routes-of-an-earlier-forward",
        bug="R3: SkyRL#1908, routes of a forward without backward are left for the next recomputation",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        patch=_router_replay_with("clear_indices", _backward_list_kept),
        says="recompute-b: ",
        diagnosis="the route of token 1 of sample 1",
    ),
    Fault(
        id="replayed-scores-normalised-again",
        bug="ISEEKYAN/Megatron-LM#49 in kind: replayed experts' weights are normalised, though norm_topk_prob is false",
        rules=("RPL-004",),
        also=("RPL-003", "LGP-004"),
        cell=cell("qwen3_moe", "one", tied=True, replay="R3"),
        patch=_router_replay_with("get_replay_topk", _scores_normalised_again),
    ),
    Fault(
        id="all-chunks-armed",
        bug="R23: SkyRL 31d6b3c, under VPP every forward gives routes to all chunks of the rank, one uses them",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R2"),
        wrap=_all_chunks_armed,
        says="the recorded forward",
        diagnosis="of sample",
    ),
    Fault(
        id="routers-by-global-list",
        bug="R11: verl#7340, miles#2570: the routers of a discarded model get the routes",
        rules=("RPL-001",),
        also=("LGP-004",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        patch=_router_replay_with("set_router_replay_action", _action_of_the_discarded),
        diagnosis="the router's own choice",
    ),
    Fault(
        id="no-logits-under-replay",
        bug="a forward under given routes is run for its routes alone, and logprobs come from one without replay",
        rules=("RPL-004",),
        cell=cell("qwen3_moe", "tp2", replay="R3"),
        wrap=_without_logits,
        says="no logits of replay-a",
        one_rank=True,
    ),
    Fault(
        id="steps-without-gates",
        bug="routers are frozen as long as routes are replayed",
        rules=("RPL-006",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_without_gates,
        says="has no gradient",
        one_rank=True,
    ),
    Fault(
        id="recorded-elsewhere",
        bug="old logprobs, and the routes with them, are those of another copy of the model than the one that trains",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", replay="R2"),
        wrap=_recorded_elsewhere,
        says="reached no expert of layer",
        one_rank=True,
    ),
    Fault(
        id="patched-router-left-on",
        bug="verl#5155 in kind: a router that was patched for replay stays so, and weighs its own experts otherwise",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_patched_by_the_first_replay,
        says="native-between: logits are off transformers' by",
        one_rank=True,
    ),
    Fault(
        id="replay-left-on",
        bug="B15 in kind: the action is not taken back, and a critic, reference or evaluation is replayed",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_left_on,
        says="native-between: ",
        one_rank=True,
        diagnosis="the routes of set a, sample 1: of another forward",
    ),
    Fault(
        id="recorded-routes-left-on",
        bug="B15 in kind: what was recorded stays, and a forward outside of replay takes it once routers have changed",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        wrap=_chosen_as_recorded,
        says="changed-native: layer 0 still takes the recorded routes",
        one_rank=True,
    ),
    Fault(
        id="routes-recorded-once",
        bug="verl#7805 in kind: the action of a step stays with routers, and the next record is of replayed routes",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        wrap=_recorded_once,
        says="record-changed: layer 0 still takes the recorded routes",
        one_rank=True,
    ),
    Fault(
        id="replay-left-on-by-logprobs",
        bug="SkyRL#1908 in kind: routes that old logprobs were computed under stay for the forwards after them",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_left_on_by_logprobs,
        says="native-before: ",
        one_rank=True,
        diagnosis="the routes of set a: of another forward",
    ),
    Fault(
        id="replay-routes-of-replica-0",
        bug="the routes of a step are broadcast from one data-parallel replica, as if all had its rows",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", world_size=2, replay="R3"),
        wrap=_routes_of_replica_0,
        says="step-a: ",
        diagnosis="of sample 0",
    ),
    Fault(
        id="ring-of-microbatches",
        bug="AReaL#1166 in kind: routes of microbatches are kept in a ring that fills before the first backward pass",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R3"),
        wrap=_ring_of_microbatches,
        says="step-a: ",
        diagnosis="of sample",
    ),
    Fault(
        id="replay-left-on-by-an-error",
        bug="SkyRL#1908 in kind: state is taken back after a forward, and not where routes are refused",
        rules=("RPL-002",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        wrap=_left_on_by_an_error,
        says="after routes were refused",
        one_rank=True,
    ),
    Fault(
        id="recomputed-experts-not-replayed",
        bug="NVIDIA-NeMo/Automodel#3156 in kind: a recomputed router chooses anew, here where MoE layers alone are",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", layers=3, replay="R3", batch="pairs"),
        wrap=_whole_layers_alone,
        says="recompute-b: ",
        diagnosis="the router's own choice",
    ),
    Fault(
        id="gate-without-gradient",
        bug="R20: ISEEKYAN/Megatron-LM#79, scores of replayed experts are cut off from the gate",
        rules=("RPL-006",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        patch=_router_replay_with("get_replay_topk", _scores_detached),
        says="the gate 0:decoder.layers.0.mlp.router.weight has no gradient",
    ),
    Fault(
        id="policy-with-scores-cut-off",
        bug="R20 in kind: ISEEKYAN/Megatron-LM#79, scores are cut off from the gate in the policy's step",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_in_the_policy("get_replay_topk", _scores_detached),
        one_rank=True,
        diagnosis="all zero",
    ),
    Fault(
        id="policy-recomputed-by-the-routers-own-choice",
        bug="NVIDIA-NeMo/Automodel#3156 in kind: the policy's forward is replayed, its recomputation is not",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_in_the_policy("get_replay_topk", _own_choice_in_the_backward),
        one_rank=True,
        says="recomputed_policy: ",
    ),
    Fault(
        id="policy-recomputed-by-the-routers-own-choice-in-bf16",
        bug="NVIDIA-NeMo/Automodel#3156 in kind: in 16 bits the forward is replayed, its recomputation is not",
        rules=("GRD-007",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16", replay="R3", loss_mask=True),
        wrap=_in_the_policy("get_replay_topk", _own_choice_in_the_backward),
        one_rank=True,
        says="recomputed_policy: the gradients are off transformers' by",
    ),
    Fault(
        id="scores-of-the-own-choice",
        bug="the weights of the router's own experts are given to the replayed ones",
        rules=("RPL-004",),
        # Behind a layer with other weights, the router of a token without a route chooses otherwise.
        also=("RPL-003", "LGP-004"),
        cell=cell("qwen3_moe", "one", replay="R3"),
        patch=_router_replay_with("get_replay_topk", _scores_of_the_own),
        says="off transformers' under the same routes",
        one_rank=True,
    ),
    Fault(
        id="recorded-scores-replayed",
        bug="R2 in kind: scores are kept with the recorded routes, and weigh experts of routers that changed since",
        rules=("RPL-008",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        patch=_router_replay_with("get_replay_topk", _scores_of_the_recorded),
        one_rank=True,
        says="final_layernorm",
    ),
    Fault(
        id="own-scores-recomputed",
        bug="R2 in kind: a recomputed router weighs the recorded experts by the scores of its own choice",
        rules=("RPL-008",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        patch=_router_replay_with("get_replay_topk", _scores_of_the_own_in_the_backward),
        one_rank=True,
        says="recompute: the gradient of",
    ),
    Fault(
        id="router-of-an-earlier-signature",
        bug="R19: verl#5155, a router patched for replay lacks padding_mask",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one", replay="R3"),
        patch=_signature_of_old,
        says="positional arguments",
    ),
    Fault(
        id="registry-asked-always",
        bug="R21: verl#7106, an empty list of routers ends a run without replay",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_registry_always,
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
    Fault(
        id="logits-scaled-in-bf16",
        bug="logits off by a twentieth, which fp32 would show at once, in the dtype that everybody trains in",
        rules=("RPL-004",),
        cell=cell("qwen3_moe", "tp2", replay="R3", dtype="bfloat16"),
        wrap=_scaled("replay", lambda logits_BSV: 1.05 * logits_BSV),
        one_rank=True,
        says="of their length",
    ),
    Fault(
        id="recorded-by-another-path",
        bug="verl#1672 in kind: what records routes divides logits by the temperature in place, and gives these out",
        rules=("RPL-005",),
        cell=cell("qwen3_moe", "one", replay="R2"),
        wrap=_divided,
        says="record: logits are off transformers' by",
        one_rank=True,
    ),
    Fault(
        id="one-router-scaled-in-bf16",
        bug="the gradient of one router off by a half, which is lost in the length of all gradients",
        rules=("RPL-008",),
        cell=cell("glm4_moe", "ep2", replay="R3", dtype="bfloat16"),
        wrap=_scaled("step", _one_router_scaled),
        one_rank=True,
        says="the gradient of decoder.layers.1.mlp.router.weight is off transformers' by 0.5 of its length",
    ),
    Fault(
        id="loss-scaled-in-bf16",
        bug="gradients off by a twentieth in bf16, under every layout",
        rules=("RPL-008",),
        cell=cell("glm4_moe", "ep2", replay="R3", dtype="bfloat16"),
        wrap=_scaled("step", lambda gradients: {key: 1.05 * gradient for key, gradient in gradients.items()}),
        one_rank=True,
        says="of their length",
    ),
    Fault(
        id="microbatches-added-in-bf16",
        bug="ISEEKYAN/Megatron-LM#149: gradients of microbatches are added up in bf16, and fp32 only at the end",
        rules=("RPL-010",),
        cell=cell("qwen3_moe", "one", replay="R3", dtype="bfloat16"),
        wrap=_added_in_bf16(),
        one_rank=True,
        diagnosis="added up in bfloat16",
    ),
    Fault(
        id="head-added-in-bf16",
        bug="Megatron-LM#6624: the gradient of the head leaves its product in bf16, and is summed so",
        rules=("RPL-010",),
        cell=cell("qwen3_moe", "one", replay="R3", dtype="bfloat16"),
        wrap=_added_in_bf16("output_layer"),
        one_rank=True,
        says="of the gradient of output_layer.weight",
    ),
    Fault(
        id="norms-added-in-bf16",
        bug="ISEEKYAN/Megatron-LM#153: products of linears add up in fp32, and what has no such product does in bf16",
        rules=("RPL-010",),
        cell=cell("qwen3_moe", "one", replay="R3", dtype="bfloat16"),
        wrap=_added_in_bf16("layernorm"),
        one_rank=True,
        says="of the gradient of norms and other vectors",
    ),
    Fault(
        id="replicas-added-in-bf16",
        bug="Megatron-LM#6624 over ranks: gradients are reduced in bf16, and buffers hold what comes of it in fp32",
        rules=("RPL-010",),
        cell=cell("qwen3_moe", "tp2-ep2", replay="R3", dtype="bfloat16"),
        patch=_reduced_in_bf16,
        diagnosis="added up in bfloat16",
    ),
)
