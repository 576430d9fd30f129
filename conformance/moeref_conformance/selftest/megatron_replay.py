"""moeref with the facet `replay` of megatron-core's RouterReplay alone: its global list, actions and order of routers.

It is right where a rank has one chunk and every token has a route; elsewhere the rules notice it. Run it with
`--target moeref_conformance.selftest.megatron_replay:target`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moeref_conformance.contract.api import Cell, Info, Session, Turn, World
from moeref_conformance.selftest.border import Swapped
from moeref_conformance.targets.moeref import MoerefTarget


class RouterReplayFacet:
    """The facet `replay`: RouterReplay's static methods, called before and after every forward of a chunk."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._recorded: list[list[Any]] = []

    def record(self, tokens_BS: Any) -> Any:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        found: dict[int, list[Any]] = {}
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        try:
            with self._around(lambda row: None, lambda row: found.update({row: RouterReplay.get_recorded_data()})):
                logits = self._session.forward.logits(tokens_BS)
        finally:
            RouterReplay.clear_global_router_replay_action()
        self._recorded = [found[row] for row in sorted(found)]
        return logits

    def replay(self, tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        with self._replayed(tokens_BS, routes):
            return self._session.forward.logits(tokens_BS)

    def step(self, tokens_BS: Any, routes: Sequence[Any] | None) -> Any:
        with self._replayed(tokens_BS, routes):
            return self._session.gradients.gradients(tokens_BS)

    @contextmanager
    def _replayed(self, tokens_BS: Any, routes: Sequence[Any] | None) -> Iterator[None]:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        data = self._recorded if routes is None else [self._cut(sample, tokens_BS.shape[1]) for sample in routes]

        def before(row: int) -> None:
            RouterReplay.set_replay_data(data[row])
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

        def after(row: int) -> None:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

        try:
            with self._around(before, after):
                yield
        finally:
            RouterReplay.clear_global_indices()
            RouterReplay.clear_global_router_replay_action()

    def _cut(self, sample: Any, length: int) -> list[Any]:
        """Routes, int64 [T, K], of each router of the rank, whose layers are taken to be consecutive.

        Missing rows are -1.
        """
        import torch
        from megatron.core import parallel_state as ps
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.router_replay import RouterReplay

        turns = sample if isinstance(sample, list) else [Turn(0, sample)]
        rows = torch.full((length, *turns[0].routes.shape[1:]), -1, dtype=torch.int64)
        for turn in turns:
            rows[turn.start : turn.start + len(turn.routes)] = torch.as_tensor(turn.routes).to(torch.int64)
        mine = rows.chunk(ps.get_tensor_model_parallel_world_size())[ps.get_tensor_model_parallel_rank()]
        modules = (m for chunk in self._session.export.chunks() for m in chunk.modules())
        first = next(m.layer_number - 1 for m in modules if isinstance(m, TopKRouter))
        count = len(RouterReplay.global_router_replay_instances)
        return [mine[:, first + i].contiguous() for i in range(count)]

    @contextmanager
    def _around(self, before: Callable[[int], None], after: Callable[[int], None]) -> Iterator[None]:
        """Call `before` and `after` each forward of a chunk, with the number of its microbatch."""
        handles = []
        for chunk in self._session.export.chunks():
            ran = [0]

            def enter(_: Any, __: Any, ran: list[int] = ran) -> None:
                before(ran[0])

            def leave(_: Any, __: Any, ___: Any, ran: list[int] = ran) -> None:
                after(ran[0])
                ran[0] += 1

            handles += [chunk.register_forward_pre_hook(enter), chunk.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class MegatronReplay(MoerefTarget):
    """moeref, except for the facet `replay`."""

    info = Info(name="megatron-replay", version=MoerefTarget.info.version)

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:  # type: ignore[override]
        """A session of moeref with this facet `replay`."""
        with super().open(cell, world) as session:
            facet = RouterReplayFacet(session) if cell.replay != "off" else None
            yield Swapped(session, replay=facet)


def target() -> MegatronReplay:
    """The target that `module:target` names."""
    return MegatronReplay()
