"""Naming bugs: layers, experts, metadata, and tensors that are in no table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import each_row
from moeref_conformance.selftest.faults.base import Fault, cell

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def _experts_not_globalised(session: Any, cell: Cell, world: World) -> Any:
    def local_number(row: NameRow) -> NameRow:
        local = _LOCAL_EXPERT.search(row.local)
        return row if local is None else border.renamed(row, lambda name: _expert_as(name, local[1]))

    return border.loads_by_table(each_row(local_number)(session, cell, world), world)


def _expert_as(name: str, number: object) -> str:
    return re.sub(r"(experts\.)\d+", rf"\g<1>{number}", name)


def _every_chunk_stage_0(session: Any, cell: Cell, world: World) -> Any:
    """Every chunk lists the layers of the rank's first chunk."""

    def table(rows: Sequence[NameRow], rank: int) -> list[NameRow]:
        first = [row for row in rows if ".layers." in row.local and row.chunk == 0]
        rest = [row for row in rows if ".layers." not in row.local]
        return rest + [replace(row, chunk=chunk) for chunk in range(cell.layout.vpp) for row in first]

    return border.loads_by_table(border.names(session, table), world)


def _layers_from(start: Callable[[int, int], int]) -> border.Change:
    """Layers are numbered from `start(chunk, pp)` on; the cell has one rank for each pipeline stage."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def numbered(row: NameRow, pp: int) -> NameRow:
            local = re.search(r"\.layers\.(\d+)\.", row.local)
            number = start(row.chunk, pp) + int(local[1]) if local else 0
            return border.renamed(row, lambda name: re.sub(r"(layers\.)\d+", rf"\g<1>{number}", name))

        return border.loads_by_table(
            border.names(session, lambda rows, rank: [numbered(row, rank) for row in rows]), world
        )

    return wrap


def _as_alone(session: Any, cell: Cell, world: World) -> Any:
    """Tables, plans and streams have a text model's names without what files have before them."""

    def own(name: str) -> str:
        return name.removeprefix("language_model.")

    renamed = border.described(lambda meta: replace(meta, name=own(meta.name)))(session, cell, world)
    return each_row(lambda row: replace(row, hf=tuple(map(own, row.hf))))(renamed, cell, world)


def _bias_unmapped(session: Any, cell: Cell, world: World) -> Any:
    """The table has no row for the bias, and loading ignores unknown tensors of the checkpoint."""
    known = {meta.name for meta in session.plan.tensors()}

    def mapped(meta: TensorMeta) -> TensorMeta | None:
        return None if meta.name.endswith("e_score_correction_bias") else meta

    def load(folder: Path) -> None:
        def only_known(tensors: border.Tensors) -> border.Tensors:
            return {name: tensor for name, tensor in tensors.items() if name in known}

        session.export.load(border.copied(folder, world, only_known))
        for row, tensor in border.held(session, world):
            if row.local.endswith("router.expert_bias"):
                tensor.zero_()

    without = border.described(mapped)(session, cell, world)
    without = border.names(without, lambda rows, rank: [r for r in rows if not r.local.endswith("router.expert_bias")])
    return border.facet(without, "export", load=load)


def _head_in_the_first_chunk(session: Any, cell: Cell, world: World) -> Any:
    def moved(row: NameRow) -> NameRow:
        return replace(row, chunk=0) if row.local == "output_layer.weight" and cell.layout.vpp > 1 else row

    return border.loads_by_table(each_row(moved)(session, cell, world), world)


def _experts_sorted_as_text(session: Any, cell: Cell, world: World) -> Any:
    """The first local expert is expert 0, the second 1, the third 10, in the table, on load and on export."""
    order = sorted(range(16), key=str)

    def renumbered(row: NameRow) -> NameRow:
        local = _LOCAL_EXPERT.search(row.local)
        return row if local is None else border.renamed(row, lambda name: _expert_as(name, order[int(local[1])]))

    def move(source: Callable[[int], int]) -> None:
        tensors = {row.local: tensor for row, tensor in border.held(session, world)}
        before = {local: tensor.clone() for local, tensor in tensors.items()}
        for local, tensor in tensors.items():
            expert = _LOCAL_EXPERT.search(local)
            if expert:
                tensor.copy_(before[_expert_as(local, source(int(expert[1])))])

    moving = border.both_ways(session, lambda: move(order.__getitem__), lambda: move(order.index))
    return each_row(renumbered)(moving, cell, world)


def _norms_swapped(session: Any, cell: Cell, world: World) -> Any:
    """The norms of q and k are swapped in the table, on load and on export."""
    other = {"q_norm": "k_norm", "k_norm": "q_norm", "q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}

    def swapped(name: str) -> str:
        return re.sub(r"[qk]_(layer)?norm", lambda norm: other[norm[0]], name)

    rows = each_row(lambda row: replace(row, hf=tuple(map(swapped, row.hf))))
    return rows(border.exchanged(session, world, swapped), cell, world)


def shards_by_tp(session: Any, cell: Cell, world: World) -> Any:
    """Experts' shards are divided by TP although ETP is 1: rows of fc1, columns of fc2."""

    def divided(row: NameRow) -> NameRow:
        if ".experts." not in row.local:
            return row
        rows, columns = row.shape
        tp = cell.layout.tp
        return replace(row, shape=(rows // tp, columns) if "linear_fc1" in row.local else (rows, columns // tp))

    return border.loads_by_table(each_row(divided)(session, cell, world), world)


def _etp_not_passed_on(cell: Cell, world: World) -> tuple[Cell, World]:
    return replace(cell, layout=replace(cell.layout, etp=cell.layout.tp)), world


def _rank_0_metadata(session: Any, cell: Cell, world: World) -> Any:
    return border.names(session, lambda rows, rank: session.names.table(0))


FAULTS = (
    Fault(
        id="experts-local-at-pp1",
        bug="B16: miles#1088 review, PP=1 returned before experts were globalised",
        rules=("NAM-001", "NAM-004"),
        also=("NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_experts_not_globalised,
    ),
    Fault(
        id="every-chunk-is-stage-0",
        bug="B22: slime a952d2f, the provider had no vp_stage",
        rules=("NAM-001", "NAM-003"),
        also=("NAM-002", "NAM-004", "NAM-007", "RUN-001"),
        cell=cell("glm4_moe", "pp2-vpp2", layers=4),
        wrap=_every_chunk_stage_0,
    ),
    Fault(
        id="custom-layout-ignores-pp",
        bug="B27: megatron-core's offset for a layout string ignores the pp_rank it is given",
        rules=("NAM-001", "NAM-003"),
        also=("NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "pp2", layers=6, pipeline_layout="Ett|tt|t|tL", vpp=2),
        wrap=_layers_from(lambda chunk, pp: (0, 4)[chunk]),
    ),
    Fault(
        id="expert-bias-unmapped",
        bug="B24: Megatron-Bridge#4657, the bias stays zero behind a warning",
        rules=("NAM-001", "NAM-005", "EXP-001", "LOD-001"),
        also=(
            "FWD-001",
            "LOD-002",
        ),
        cell=cell("glm4_moe", "pp2"),
        wrap=_bias_unmapped,
        diagnosis="all zero",
        one_rank=True,
    ),
    Fault(
        id="metadata-of-rank-0",
        bug="SkyRL#1816: every rank's buffer sliced with rank 0's names and shapes",
        rules=("NAM-001", "NAM-005"),
        also=("NAM-002", "NAM-003", "NAM-007"),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_rank_0_metadata,
    ),
    Fault(
        id="layers-not-globalised",
        bug="B23: NeMo-RL#3903, tensors of two layers under one global name",
        rules=("NAM-002",),
        also=("NAM-003",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=each_row(lambda row: replace(row, global_name=row.local)),
    ),
    Fault(
        id="etp-not-passed-on",
        bug="B5 in kind: slime#1737, miles#803: one runtime field is not passed on, and its default runs",
        rules=("TOP-001",),
        also=("NAM-004", "NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4),
        given=_etp_not_passed_on,
        says="etp rank is",
    ),
    Fault(
        id="vpp-offset-of-equal-stages",
        bug="Megatron-LM#1584: VPP offsets ignore that the last stage has its own number of layers",
        rules=("NAM-001", "NAM-003"),
        also=("NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=6, last=2),
        wrap=_layers_from(lambda chunk, pp: chunk * 3 + pp * (3 // 2)),
    ),
    Fault(
        id="head-in-the-first-chunk",
        bug="B34: Megatron-Bridge#4694, output layer not found at VPP>1",
        rules=("NAM-002", "RUN-001"),
        cell=cell("glm4_moe", "pp2-vpp2", layers=4),
        wrap=_head_in_the_first_chunk,
        says="output_layer.weight",
    ),
    Fault(
        id="experts-sorted-as-text",
        bug="names sorted as text: expert 10 before expert 2, both ways",
        rules=("NAM-004", "LOD-001"),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_experts_sorted_as_text,
        diagnosis="holds expert 10",
        one_rank=True,
    ),
    Fault(
        id="q-and-k-norm-swapped",
        bug="two rows of a table with each other's names, both ways: the round trip is clean",
        rules=("NAM-002", "LOD-001", "FWD-001"),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_norms_swapped,
        diagnosis="is k_layernorm of the same layer",
        one_rank=True,
    ),
    Fault(
        id="expert-shards-by-tp",
        bug="Megatron-Bridge#2746: expert shapes computed with TP where ETP differs",
        rules=("RUN-001",),
        also=("NAM-007",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4),
        wrap=shards_by_tp,
        says="the table says",
    ),
    Fault(
        id="text-model-without-its-prefix",
        bug="tt-metal#48443 in kind: names of a text model that files have beside a vision model are as of one alone",
        rules=("NAM-001", "NAM-002", "EXP-001"),
        also=("EXP-007",),
        cell=cell("kimi_k25", "tp2"),
        wrap=_as_alone,
        says="language_model.",
    ),
    Fault(
        id="prefix-of-a-wrapper",
        bug="names read through a wrapper keep its `module.`",
        rules=("NAM-005",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=each_row(lambda row: replace(row, local=f"module.{row.local}")),
        says="has no tensor module.",
    ),
)
