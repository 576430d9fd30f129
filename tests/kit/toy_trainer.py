"""Targets that look at moeref's trainer: at the master weights of before a load, and at its groups of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.moeref import MoerefTarget


class NeverReloads(MoerefTarget):
    """moeref, whose user has forgotten `Trainer.reload`."""

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        """As of the good target."""
        from moeref.megatron.optimizer import Trainer

        with mock.patch.object(Trainer, "reload"), super().open(cell, world) as session:
            yield session


class LooksAtDecay(MoerefTarget):
    """moeref, whose steps fail where a group decays otherwise than Megatron's training loop has it."""

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        """As of the good target."""
        from moeref.megatron.optimizer import Trainer

        good = Trainer.step

        def step(trainer: Trainer, *given: Any) -> float | None:
            groups = trainer.optimizer.param_groups
            of_vectors = {group["weight_decay"] for group in groups if group["params"][0].dim() == 1}
            of_others = {group["weight_decay"] for group in groups if group["params"][0].dim() > 1}
            assert of_vectors == {0.0}, of_vectors
            assert of_others in ({0.0}, {0.3}), of_others
            return good(trainer, *given)

        with mock.patch.object(Trainer, "step", step), super().open(cell, world) as session:
            yield session


never_reloads = NeverReloads()
looks_at_decay = LooksAtDecay()
