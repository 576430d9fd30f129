"""Targets that differ from moeref in their training steps alone: wrong by the cell's tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from moeref_conformance.contract.api import Cell, Info, Session, World
from moeref_conformance.selftest.border import each_chunk, facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.gradients import configured
from moeref_conformance.selftest.faulty import FaultyTarget
from moeref_conformance.targets.moeref import MoerefTarget


def _noting_marks(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Every parameter records the attributes that megatron-core gives it (`allreduce`, `sequence_parallel`)."""
    from megatron.core.models.gpt import GPTModel

    good = GPTModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        good(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.marks_of_megatron = dict(vars(parameter))

    return mock.patch.object(GPTModel, "__init__", init)


def _marked_by_megatron(chunk: Any) -> None:
    for parameter in chunk.parameters():
        vars(parameter).update(vars(parameter).pop("marks_of_megatron"))


#: What one of the supported versions of megatron-core computes wrongly without an error.
SILENT: Mapping[str, Fault] = {
    fault.id: fault
    for fault in (
        Fault(
            id="unmarked-experts",
            bug="0.16.1: ETP other than TP at EP=1, with the marks that megatron-core sets itself",
            rules=("GRD-001",),
            cell=cell("qwen3_moe", "tp2-etp1"),
            patch=_noting_marks,
            wrap=each_chunk(_marked_by_megatron),
        ),
        Fault(
            id="outputs-deallocated",
            bug="0.16.1: gloo, overlapped sends and deallocate_pipeline_outputs",
            rules=("GRD-001",),
            also=("CFG-004",),
            cell=cell("qwen3_moe", "pp2-vpp2", layers=4),
            wrap=configured(deallocate_pipeline_outputs=True),
        ),
    )
}


class Silent(MoerefTarget):
    """moeref with the faults of SILENT that the cell's tags name."""

    info = Info(name="silent", version="1")

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:  # type: ignore[override]
        return FaultyTarget(*(SILENT[tag] for tag in cell.tags)).open(cell, world)


class Scaled(MoerefTarget):
    """moeref with the gradients of replayed steps times the number that is the cell's tag."""

    info = Info(name="scaled", version="1")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:  # type: ignore[override]
        with super().open(cell, world) as session:
            good: Any = session.replay
            factor = float(cell.tags[0]) if cell.tags else 1.0

            def step(tokens_BS: Any, routes: Any) -> Any:
                return {key: factor * gradient for key, gradient in good.step(tokens_BS, routes).items()}

            yield facet(session, "replay", step=step)


silent = Silent()
scaled = Scaled()
