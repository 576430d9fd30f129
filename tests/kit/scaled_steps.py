"""A target for a world: moeref, whose gradients of replayed training steps are too large by the cell's tag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moeref_conformance.contract.api import Cell, Info, Session, World
from moeref_conformance.selftest.faults.rewrite import Swapped
from moeref_conformance.targets.moeref import MoerefTarget


class _Scaled:
    def __init__(self, good: Any, factor: float) -> None:
        self._good, self._factor = good, factor
        self.record, self.replay = good.record, good.replay

    def step(self, tokens_BS: Any, routes: Any) -> Any:
        return {key: self._factor * gradient for key, gradient in self._good.step(tokens_BS, routes).items()}


class ScaledSteps(MoerefTarget):
    """moeref with replayed gradients times the number that is the cell's tag."""

    info = Info(name="scaled-steps", version="1")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:  # type: ignore[override]
        with super().open(cell, world) as session:
            factor = float(cell.tags[0]) if cell.tags else 1.0
            yield Swapped(session, replay=_Scaled(session.replay, factor))


def target() -> ScaledSteps:
    return ScaledSteps()
