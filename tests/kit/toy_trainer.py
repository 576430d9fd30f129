"""A target whose optimizer keeps the master weights of before a load."""

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


target = NeverReloads()
