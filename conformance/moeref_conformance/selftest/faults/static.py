"""Bugs that show without processes: shapes of shards, and the plan that is made before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.names import shards_by_tp

_COPY = re.compile(r"\.layers\.\d+\.(?:embed_tokens|shared_head\.head)\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _planned(keep: Callable[[TensorMeta, Cell], bool]) -> border.Change:
    """A plan, made before anything is built, that leaves tensors out."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.plan
        return border.facet(session, "plan", tensors=lambda: [t for t in good.tensors() if keep(t, cell)])

    return wrap


def _planned_as(change: Callable[[TensorMeta], TensorMeta]) -> border.Change:
    """A plan whose entries are changed."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.plan
        return border.facet(session, "plan", tensors=lambda: [change(tensor) for tensor in good.tensors()])

    return wrap


def _padded(tensor: TensorMeta) -> TensorMeta:
    if tensor.name not in ("lm_head.weight", "model.embed_tokens.weight"):
        return tensor
    rows, width = tensor.shape
    return replace(tensor, shape=(rows + 128 - rows % 128, width))


def _of_the_first_ep_rank(tensor: TensorMeta, cell: Cell) -> bool:
    expert = _EXPERT.search(tensor.name)
    return expert is None or int(expert[1]) < 16 // cell.layout.ep


def _with_etp_1(row: NameRow) -> NameRow:
    """Shapes of experts are those of ETP 1, in a cell with two TP ranks that leaves ETP unset."""
    if ".experts." not in row.local:
        return row
    rows, columns = row.shape
    return replace(row, shape=(rows, 2 * columns) if "linear_fc2" in row.local else (2 * rows, columns))


def _predicting_swapped(session: Any, cell: Cell, world: World) -> Any:
    """The two multi-token prediction layers after the decoder's, each under the other's number."""

    def swapped(row: NameRow) -> NameRow:
        if not row.local.startswith("mtp."):
            return row
        other = partial(re.sub, r"layers\.(\d+)\.", lambda layer: f"layers.{2 * cell.layers + 1 - int(layer[1])}.")
        return replace(row, hf=tuple(map(other, row.hf)))

    return border.each_row(swapped)(session, cell, world)


FAULTS = (
    Fault(
        id="mtp-layers-swapped",
        bug="layers for multi-token prediction are counted from the last one, so that two change places",
        rules=("NAM-003",),
        cell=cell("glm4_moe", "pp2", mtp=2, backend="static"),
        wrap=_predicting_swapped,
        says="is layer 2, the table says 3",
    ),
    Fault(
        id="etp-unset-is-1",
        bug="Megatron-Bridge#4579: ETP that is unset is TP in Megatron-Core, and 1 in the bridge's tables",
        rules=("NAM-007",),
        cell=cell("qwen3_moe", "tp2", backend="static"),
        wrap=border.each_row(_with_etp_1),
        says="a shard of",
    ),
    Fault(
        id="expert-shapes-by-tp",
        bug="Megatron-Bridge#2746: expert shapes computed with TP where ETP differs",
        rules=("NAM-007",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4, backend="static"),
        wrap=shards_by_tp,
        says="a shard of",
    ),
    Fault(
        id="bias-listed-in-bf16",
        bug="miles#811 in the table: every tensor of a model in bf16 is listed as bf16, the experts' bias too",
        rules=("NAM-007",),
        cell=cell("glm4_moe", "tp1", backend="static", dtype="bfloat16"),
        wrap=border.each_row(lambda row: replace(row, dtype="bfloat16")),
        says="expert_bias is bfloat16 here",
    ),
    Fault(
        id="up-listed-before-gate",
        bug="Megatron-Bridge#1817 in the table: who cuts a tensor by its names takes up for gate, and v for q",
        rules=("NAM-002",),
        cell=cell("qwen3_moe", "tp2", backend="static"),
        wrap=border.each_row(lambda row: replace(row, hf=row.hf[::-1])),
        says="up_proj.weight'], the table says",
    ),
    Fault(
        id="plan-without-copies",
        bug="Megatron-Bridge 0.6.2 exports MTP layers without their copies of embedding and head",
        rules=("PLN-001",),
        cell=cell("glm4_moe", "pp2", mtp=1, backend="static"),
        wrap=_planned(lambda tensor, cell: not _COPY.search(tensor.name)),
        says="embed_tokens.weight is not planned",
    ),
    Fault(
        id="plan-of-local-experts",
        bug="SkyRL#1471 in the plan: one expert-parallel rank's experts are taken for all",
        rules=("PLN-001",),
        cell=cell("qwen3_moe", "ep4", backend="static"),
        wrap=_planned(_of_the_first_ep_rank),
        says="experts.10.",
    ),
    Fault(
        id="bias-planned-in-bf16",
        bug="miles#811 in the plan: a receiver makes buffers in the model's dtype for the experts' bias too",
        rules=("PLN-001",),
        cell=cell("glm4_moe", "tp1", backend="static", dtype="bfloat16"),
        wrap=_planned_as(lambda tensor: replace(tensor, dtype="bfloat16")),
        says="e_score_correction_bias is float32, the plan says bfloat16",
    ),
    Fault(
        id="padded-rows-planned",
        bug="Megatron-Bridge 0.6.2 in the plan: shapes have the rows that pad the vocabulary",
        rules=("PLN-001",),
        cell=cell("qwen3_moe", "tp2", backend="static"),
        wrap=_planned_as(_padded),
        says="shape of model.embed_tokens.weight is [131, 40]",
    ),
)
