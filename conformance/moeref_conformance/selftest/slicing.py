"""The facet `replay` as frameworks with a controller of their own have it: routes are cut for each router, by a walk.

verl and slime find the routers of each chunk of a rank, cut the rows over CP and TP, take each router's layer by its
number, and set megatron-core's RouterReplay around every forward of that chunk. The last token gets the route of the
one before, and routes have no missing rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Swapped
from moeref_conformance.selftest.faults.context import zigzag
from moeref_conformance.selftest.faults.routes import Rows, joined


class WalkedReplay:
    """The facet `replay`, R3 only."""

    def __init__(self, session: Any, cell: Cell, world: World) -> None:
        self._session, self._layout = session, cell.layout
        self._at = topology.coords(cell.layout, world.rank)
        config = session.config.given()
        self._experts, self._row = config["num_moe_experts"], (config["num_layers"], config["moe_router_topk"])

    def replay(self, tokens_BS: Any, routes: Sequence[Any]) -> Any:
        """A forward under `routes`."""
        with self._replayed(tokens_BS, routes):
            return self._session.forward.logits(tokens_BS)

    def step(self, tokens_BS: Any, routes: Sequence[Any]) -> Any:
        """A training step under `routes`."""
        with self._replayed(tokens_BS, routes):
            return self._session.gradients.gradients(tokens_BS)

    @contextmanager
    def _replayed(self, tokens_BS: Any, routes: Sequence[Any]) -> Iterator[None]:
        if len(routes) != len(tokens_BS):
            raise ValueError(f"routes of {len(routes)} samples for {len(tokens_BS)}")
        mine = [self._cut(sample, tokens_BS.shape[1]) for sample in routes]
        with ExitStack() as stack:
            for chunk in self._session.export.chunks():
                stack.enter_context(_armed(chunk, mine))
            yield

    def _cut(self, sample: Any, tokens: int) -> torch.Tensor:
        """The rows [T, all layers, K] of this rank."""
        rows = joined(sample, tokens) if isinstance(sample, list) else np.array(sample)
        rows = rows if len(rows) == tokens else np.concatenate([rows, rows[-1:]])
        rows[-1] = rows[-2]
        self._check(rows, tokens)
        held_TLK = torch.as_tensor(rows.astype(np.int64))
        held_TLK = held_TLK[zigzag(tokens, self._layout.cp)].chunk(self._layout.cp)[self._at["cp"]]
        return held_TLK.chunk(self._layout.tp)[self._at["tp"]]

    def _check(self, rows: Rows, tokens: int) -> None:
        if rows.shape != (tokens, *self._row):
            raise ValueError(f"routes of shape {list(rows.shape)}, expected {[tokens, *self._row]}")
        if rows.min() < 0 or rows.max() >= self._experts:
            raise ValueError(f"experts {rows.min()} to {rows.max()}")
        sorted_LK = np.sort(rows[:, -1])
        if (sorted_LK[:, 1:] == sorted_LK[:, :-1]).any():
            raise ValueError("an expert twice in a row")


@contextmanager
def _armed(chunk: torch.nn.Module, mine: Sequence[torch.Tensor]) -> Iterator[None]:
    """Set the routers of one chunk before each of its forwards; the last microbatch may be repeated."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    routers = [(m.layer_number - 1, m.router_replay) for m in chunk.modules() if isinstance(m, TopKRouter)]
    ran = [0]

    def enter(*_: Any) -> None:
        for layer, replay in routers:
            replay.set_target_indices(mine[min(ran[0], len(mine) - 1)][:, layer].contiguous())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def leave(*_: Any) -> None:
        ran[0] += 1
        for _layer, replay in routers:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    handles = [chunk.register_forward_pre_hook(enter), chunk.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for _, replay in routers:
            replay.clear_indices()
            replay.clear_router_replay_action()


def walked(session: Session, cell: Cell, world: World) -> Any:
    """A benign target's `wrap`: the good session with this facet."""
    return Swapped(session, replay=WalkedReplay(session, cell, world))
