"""Configurations that megatron-core computes wrongly without a word, in one version or in both: targets for a world."""

from __future__ import annotations

from contextlib import AbstractContextManager

from moeref_conformance.contract.api import Cell, Info, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, cell
from moeref_conformance.selftest.faults.gradients import built
from moeref_conformance.selftest.faulty import FaultyTarget
from moeref_conformance.targets.moeref import MoerefTarget

SILENT = {
    fault.id: fault
    for fault in (
        Fault(
            id="unmarked-experts",
            bug="0.16.1: ETP other than TP at EP=1, with the marks that megatron-core sets itself",
            rules=("GRD-001",),
            cell=cell("qwen3_moe", "tp2-etp1"),
            edits=lambda rooms: [Edit(rooms["megatron.build"], "_of_the_expert_grid", lambda chunk: None)],
        ),
        Fault(
            id="outputs-deallocated",
            bug="0.16.1: gloo, overlapped sends and deallocate_pipeline_outputs",
            rules=("GRD-001",),
            also=("CFG-004",),
            cell=cell("qwen3_moe", "pp2-vpp2", layers=4),
            edits=built(deallocate_pipeline_outputs=True),
        ),
    )
}


class Silent(MoerefTarget):
    """moeref with the fault that the cell's tag names."""

    info = Info(name="silent", version="1")

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:  # type: ignore[override]
        return FaultyTarget(*(SILENT[tag] for tag in cell.tags)).open(cell, world)


def target() -> Silent:
    return Silent()
