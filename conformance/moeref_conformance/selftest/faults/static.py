"""Bugs that arithmetic alone shows: shapes of shards, and the plan that is made before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from moeref_conformance.contract.api import Cell, Session, TensorMeta, World
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.names import shards_by_tp
from moeref_conformance.selftest.faults.rewrite import Swapped

_COPY = re.compile(r"\.layers\.\d+\.(?:embed_tokens|shared_head\.head)\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class _Planned(Swapped):
    """A session, and its plan facet, with tensors left out."""

    def __init__(self, session: Session, keep: Callable[[TensorMeta], bool]) -> None:
        super().__init__(session, plan=self)
        self._good, self._keep = session.plan, keep

    def tensors(self) -> Sequence[TensorMeta]:
        assert self._good is not None
        return [t for t in self._good.tensors() if self._keep(t)]


def _without_copies(session: Session, cell: Cell, world: World) -> Any:
    return _Planned(session, lambda tensor: not _COPY.search(tensor.name))


def _of_local_experts(session: Session, cell: Cell, world: World) -> Any:
    def keep(tensor: TensorMeta) -> bool:
        expert = _EXPERT.search(tensor.name)
        return expert is None or int(expert[1]) < 16 // cell.layout.ep

    return _Planned(session, keep)


FAULTS = (
    Fault(
        id="expert-shapes-by-tp",
        bug="Megatron-Bridge#2746: expert shapes computed with TP where ETP differs",
        rules=("NAM-007",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4, backend="static"),
        edits=shards_by_tp,
        says="a shard of",
    ),
    Fault(
        id="plan-without-copies",
        bug="Megatron-Bridge 0.6.2 exports MTP layers without their copies of embedding and head",
        rules=("PLN-001",),
        cell=cell("glm4_moe", "pp2", mtp=1, backend="static"),
        wrap=_without_copies,
        says="shared_head.head.weight is not planned",
    ),
    Fault(
        id="plan-of-local-experts",
        bug="SkyRL#1471 in the plan: one expert-parallel rank's experts are taken for all",
        rules=("PLN-001",),
        cell=cell("qwen3_moe", "ep4", backend="static"),
        wrap=_of_local_experts,
        says="experts.15.",
    ),
)
