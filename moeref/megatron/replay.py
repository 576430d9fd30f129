"""Records and replays routes with megatron-core's RouterReplay, in the given model chunks only.

`recording` stores the routes of every microbatch of one schedule (the first forward of R2). `replaying` sets the routes
of each microbatch (the training forward of R2, both forwards of R3). Only the choice of experts is replayed: gate
scores are the router's own and have gradients.

Routers are found by walking the chunks. RouterReplay's global list is not used, because it also has routers of other
and discarded models. `moeref.megatron.routers` says which of them can be recorded and replayed.

The number of a microbatch is the number of earlier forwards of its chunk: every schedule of megatron-core runs the
microbatches of a chunk in order, and their backwards in the same order. So each router has a FIFO of targets: a forward
appends to it, recomputation takes from it, and it is empty before and after a schedule. Without recomputation it is
emptied after each forward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from moeref.megatron.routers import SCOPED, AuxLoss, Router, check_fit, checked_routers, config_of, routers
from moeref.replay import MISSING, PAD, RouteError, Routes, index_dtype, marked, merge_layers, routes

Given = Sequence[Routes] | Callable[[int], Routes] | Iterable[Routes]


class Recording:
    """The routes of one schedule on this rank: for its tokens, in the MoE layers of all its chunks."""

    def __init__(self, experts: int, top_k: int) -> None:
        self._microbatches: dict[int, dict[int, np.ndarray[Any, Any]]] = {}
        self._experts, self._top_k = experts, top_k
        self._columns: dict[int, int] = {}

    def add(self, microbatch: int, routers: Sequence[Router], columns: int) -> None:
        """Store what the routers of a chunk recorded in its last forward, on input [S, columns, H].

        Raises RouteError if one recorded nothing.
        """
        self._columns[microbatch] = columns
        layers = self._microbatches.setdefault(microbatch, {})
        for router in routers:
            idx_TK = router.replay.get_recorded_indices()
            if idx_TK is None:
                raise RouteError(f"layer {router.layer} recorded nothing; was its router run, and is it not fused?")
            layers[router.layer] = idx_TK.detach().cpu().numpy()

    @property
    def microbatches(self) -> int:
        """The number of microbatches recorded."""
        return len(self._microbatches)

    def routes(self, microbatch: int) -> Routes:
        """The routes of one microbatch, in ascending order of layers; without rows on a rank without MoE layers.

        Raises KeyError for a microbatch that did not run.
        """
        layers = self._microbatches[microbatch]
        if not layers:
            none_TLK = np.zeros((0, 0, self._top_k), index_dtype(self._experts))
            return Routes(none_TLK, (), self._experts, np.zeros(0, np.uint8), np.zeros(0, np.int32))
        parts = [routes(idx_TK[:, None], layers=[i], experts=self._experts) for i, idx_TK in layers.items()]
        return replace(merge_layers(parts), batch=self._columns[microbatch])


@contextmanager
def recording(chunks: Sequence[torch.nn.Module], *, mtp: bool = False) -> Iterator[Recording]:
    """Record the forwards of one schedule. Raises RouteError on entry for routers that cannot be recorded."""
    walked = [checked_routers(chunk, mtp=mtp, aux_loss="native") for chunk in chunks]
    config = config_of(chunks[0])
    recorded = Recording(config.num_moe_experts, config.moe_router_topk)
    columns = [1] * len(chunks)

    def see(chunk: int, input_SBH: torch.Tensor) -> None:
        columns[chunk] = input_SBH.shape[1]

    def before(number: int, chunk: int) -> None:
        for router in walked[chunk]:
            router.replay.set_router_replay_action(RouterReplayAction.RECORD)

    def after(number: int, chunk: int) -> None:
        recorded.add(number, walked[chunk], columns[chunk])
        for router in walked[chunk]:
            router.replay.clear_indices()
            router.replay.clear_router_replay_action()

    with ExitStack() as stack:
        for chunk, router in _numbered(walked):
            stack.enter_context(_input_seen(router, functools.partial(see, chunk)))
        stack.enter_context(_scope(chunks, walked, before, after))
        yield recorded


@contextmanager
def replaying(
    chunks: Sequence[torch.nn.Module], given: Given, *, mtp: bool = False, aux_loss: AuxLoss = "refuse"
) -> Iterator[None]:
    """Replay the routes of microbatch m in its forward of one schedule, and in its recomputation.

    given: one Routes per microbatch, as `shard_to_rank` makes them of `packed` or `batched` samples: the rows of this
    rank's tokens in the order of its routers, and at least the layers of its chunks. A sequence is checked on entry; a
    function of m and an iterator are asked once for each microbatch, when its first chunk runs it. Targets are int32,
    and copied to the device for one microbatch of one chunk at a time.
    mtp: replay the routers of multi-token prediction layers too; otherwise they route as usual.
    aux_loss: megatron-core computes load-balancing losses over the router's own top-k, not over the replayed routes.
    "refuse" raises RouteError for models with such a loss; "native" accepts them.

    In MISSING rows and in holes the router's own top-k is used. PAD rows are not counted for the expert bias.

    Raises RouteError on entry for models or routes that cannot be replayed, in the forward if the number of rows or
    their order (packed, or batched over B samples) does not match its input, and at the end if the number of
    microbatches does not. The routers are reset on any exit.
    """
    walked = [checked_routers(chunk, mtp=mtp, aux_loss=aux_loss) for chunk in chunks]
    replayed = [[_Replayed(router) for router in routers] for routers in walked]
    source = _Source(given, walked)

    def before(number: int, chunk: int) -> None:
        routes = source.take(number, chunk)
        targets_LTK = _device_targets(routes, walked[chunk])
        for one, target_TK in zip(replayed[chunk], targets_LTK, strict=True):
            one.arm(routes, target_TK)

    def after(number: int, chunk: int) -> None:
        for one in replayed[chunk]:
            one.rest()

    with ExitStack() as stack:
        for one in (one for routers in replayed for one in routers):
            stack.enter_context(one.installed())
        stack.enter_context(_scope(chunks, walked, before, after))
        yield
        source.check_end()


class _Source:
    """The routes of each microbatch, asked for once and kept until every chunk has run it."""

    def __init__(self, given: Given, walked: Sequence[Sequence[Router]]) -> None:
        self._walked, self._ran = walked, [0] * len(walked)
        self._kept: dict[int, Routes] = {}
        self._length = len(given) if isinstance(given, Sequence) else None
        if isinstance(given, Sequence):
            for one in given:
                self._check(one)
        self._rest = iter(map(given, itertools.count()) if callable(given) else given)
        self._endless = callable(given)

    def take(self, number: int, chunk: int) -> Routes:
        """The routes of a microbatch that a chunk is about to run. Raises RouteError if there are none."""
        if number == max(self._ran):
            routes = next(self._rest, None)
            if routes is None:
                raise RouteError(f"chunk {chunk} runs microbatch {number}, but routes are given for {number}")
            if self._length is None:
                self._check(routes)
            self._kept[number] = routes
        self._ran[chunk] = number + 1
        return self._kept[number] if number >= min(self._ran) else self._kept.pop(number)

    def check_end(self) -> None:
        """Raise RouteError unless every chunk ran every microbatch."""
        most = max(self._ran) if self._length is None else self._length
        if short := [i for i, count in enumerate(self._ran) if count != most]:
            counts = ", ".join(f"chunk {i} ran {self._ran[i]}" for i in short)
            raise RouteError(f"routes are given for {most} microbatches, but {counts}")
        if not self._endless and next(self._rest, None) is not None:
            raise RouteError(f"routes are given for more than the {most} microbatches that ran")

    def _check(self, routes: Routes) -> None:
        for of_chunk in self._walked:
            check_fit(routes, of_chunk)


class _Replayed:
    """One router inside a `replaying` block."""

    def __init__(self, router: Router) -> None:
        self._router, self._replay = router, router.replay
        self._original = self._replay.get_replay_topk
        self._experts: int = router.module.config.num_moe_experts
        self._given: Routes | None = None
        self._lacks = False
        self._padding_T: torch.Tensor | None = None
        self._counted_E: torch.Tensor | None = None

    def arm(self, given: Routes, target_TK: torch.Tensor) -> None:
        """Replay `target_TK`, as `_device_targets` makes it, in the next forward."""
        self._given = given
        self._lacks = bool((given.kind_T == MISSING).any()) or given.holes_TL is not None
        self._replay.set_target_indices(target_TK)
        self._replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def rest(self) -> None:
        """Until the next forward only recomputation runs this router; it takes the head of the FIFO."""
        self._replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        if self._router.module.config.recompute_granularity is None:
            self._replay.clear_indices()  # nothing will take it

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put this in the place of the router's choice, and around its forward."""
        module = self._router.module
        handles = [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]
        self._replay.get_replay_topk = self._topk
        try:
            yield
        finally:
            del self._replay.get_replay_topk  # removes the instance's override
            for handle in handles:
                handle.remove()

    def _before(self, module: TopKRouter, args: tuple[torch.Tensor, ...]) -> None:
        if self._replay.router_replay_action == RouterReplayAction.REPLAY_FORWARD and self._given is not None:
            _check_order(self._router.layer, self._given, *args[0].shape[:2])
        counts = module.enable_expert_bias and torch.is_grad_enabled()
        self._counted_E = module.local_tokens_per_expert.clone() if counts else None

    def _after(self, module: TopKRouter, _: Any, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count the tokens of each expert again, without padding. megatron-core's mask fails for one of [T]."""
        if self._counted_E is not None and self._padding_T is not None:
            with torch.no_grad():
                mine_TE = out[1] & ~self._padding_T[:, None]
                module.local_tokens_per_expert.copy_(self._counted_E + mine_TE.sum(dim=0))
        self._padding_T = None

    def _topk(
        self,
        scores_TE: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> Any:
        """RouterReplay.get_replay_topk, with the router's own top-k where a route is missing."""
        replay = self._replay
        if replay.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            target_TK = replay.target_topk_idx
            if self._lacks:
                assert default_compute_topk is not None
                _, own_TK = default_compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
                target_TK = torch.where(target_TK < 0, own_TK.to(target_TK.dtype), target_TK)
                # Recomputation must use the same experts, even if its own top-k would differ.
                replay.replay_backward_list[-1] = target_TK
            replay.target_topk_idx = self._experts_of(target_TK)
        elif replay.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            if not replay.replay_backward_list:
                raise RouteError(
                    f"layer {self._router.layer} runs outside a forward of its chunk, and config.recompute_granularity "
                    f"is {self._router.module.config.recompute_granularity}: let megatron-core recompute it"
                )
            replay.replay_backward_list[0] = self._experts_of(replay.replay_backward_list[0])
        return self._original(scores_TE, topk, num_groups, group_topk, default_compute_topk)

    def _experts_of(self, target_TK: torch.Tensor) -> torch.Tensor:
        """The int64 experts that RouterReplay gathers; keeps which rows are padding."""
        self._padding_T = target_TK[:, 0] >= self._experts
        return (target_TK % self._experts).long()


def _check_order(layer: int, given: Routes, length: int, columns: int) -> None:
    """Raise RouteError if routes do not belong to a router's input [length, columns, H]."""
    if given.tokens != length * columns:
        raise RouteError(
            f"layer {layer} routes {length * columns} tokens on this rank, its routes have {given.tokens} rows; are "
            f"they split for this rank's context and sequence parallelism, and padded?"
        )
    if given.batch != columns:
        order = "packed, or of one sample" if given.batch == 1 else f"batched over {given.batch} samples"
        raise RouteError(
            f"layer {layer} routes a batch of {columns} samples, its routes are {order}; make them with "
            f"{'packed' if columns == 1 else f'batched of {columns} samples'}"
        )


@contextmanager
def _input_seen(router: Router, see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `see` with every input [S, B, H] of the router."""
    handle = router.module.register_forward_pre_hook(lambda _, args: see(args[0]))
    try:
        yield
    finally:
        handle.remove()


def _numbered(walked: Sequence[Sequence[Router]]) -> Iterator[tuple[int, Router]]:
    """Every router with the number of its chunk."""
    return ((chunk, router) for chunk, routers in enumerate(walked) for router in routers)


def _disarm(replays: Sequence[RouterReplay]) -> None:
    """Reset the routers: no action, no targets, no records."""
    for replay in replays:
        replay.clear_indices()
        replay.clear_router_replay_action()


def _device_targets(given: Routes, walked: Sequence[Router]) -> torch.Tensor:
    """The int32 targets [L, T, K] of the routers of a chunk, on their device, in one copy.

    -1 where the router's own top-k is used. In PAD rows the number of experts is added to each.
    """
    chosen_LTK = marked(given, [router.layer for router in walked])
    chosen_LTK[:, given.kind_T == PAD] += given.experts
    targets_LTK = torch.from_numpy(chosen_LTK)
    device = walked[0].module.weight.device if walked else torch.device("cpu")
    return targets_LTK.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else targets_LTK


@contextmanager
def _scope(
    chunks: Sequence[torch.nn.Module],
    walked: Sequence[Sequence[Router]],
    before: Callable[[int, int], None],
    after: Callable[[int, int], None],
) -> Iterator[None]:
    """Call `before(microbatch, chunk)` and `after` around every forward. Reset the routers on exit."""
    counts, running = [0] * len(chunks), [False] * len(chunks)
    hooks = []
    for number, chunk in enumerate(chunks):

        def enter(_: Any, __: Any, number: int = number) -> None:
            if running[number]:
                raise RouteError(f"a forward of chunk {number} did not end; repeat the schedule in a new block")
            before(counts[number], number)
            running[number] = True

        def leave(_: Any, __: Any, ___: Any, number: int = number) -> None:
            after(counts[number], number)
            counts[number] += 1
            running[number] = False

        hooks += [chunk.register_forward_pre_hook(enter), chunk.register_forward_hook(leave)]
    replays = [router.replay for routers in walked for router in routers]
    for replay in replays:
        replay.clear_indices()
        SCOPED.add(replay)
    try:
        yield
    finally:
        for replay in replays:
            SCOPED.discard(replay)
        for hook in hooks:
            hook.remove()
        _disarm(replays)


__all__ = ["AuxLoss", "Recording", "Router", "recording", "replaying", "routers"]
