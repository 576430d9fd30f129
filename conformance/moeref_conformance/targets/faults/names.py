"""Naming bugs: layers, experts, metadata and tensors that no table knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from moeref_conformance.api import Cell, NameRow, Session, World
from moeref_conformance.targets.faults.base import Edit, Fault, Rooms, cell


def _local_experts_at_pp1(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["units"].Layout
    good = layout.experts

    def experts(self: Any, ep_rank: int, num_experts: int) -> range:
        found: range = good(self, ep_rank, num_experts)
        return range(len(found)) if self.pp == 1 else found

    return [Edit(layout, "experts", experts)]


def _every_chunk_stage_0(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["units"].Layout
    good = layout.stages

    def stages(self: Any, num_layers: int, **kwargs: Any) -> Any:
        found = good(self, num_layers, **kwargs)
        return replace(found, layers={(pp, vp): found.layers[pp, 0] for pp, vp in found.layers})

    return [Edit(layout, "stages", stages)]


def _custom_layout_ignores_pp(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["units"].Layout
    good = layout.stages

    def stages(self: Any, num_layers: int, **kwargs: Any) -> Any:
        found = good(self, num_layers, **kwargs)
        if self.layout is None:
            return found
        first = {vp: found.offsets[0, vp] for _, vp in found.layers}
        wrong = {(pp, vp): tuple(range(first[vp], first[vp] + len(at))) for (pp, vp), at in found.layers.items()}
        return replace(found, layers=wrong)

    return [Edit(layout, "stages", stages)]


def _bias_unmapped(rooms: Rooms) -> Iterable[Edit]:
    families, load = rooms["families"], rooms["loader"]
    good_rows, good_inventory, good_check = families.rows, load.inventory, load.check_headers

    def rows(model: Any) -> Any:
        return tuple(r for r in good_rows(model) if not r.megatron.endswith("router.expert_bias"))

    def inventory(chunks: Any) -> Any:  # parameters only, so that the buffer is not missed
        return {k: v for k, v in good_inventory(chunks).items() if not k[1].endswith("router.expert_bias")}

    def check(checkpoint: Any, wanted: Any, *where: Any) -> None:
        known = {t.name for t in wanted}
        for name in checkpoint.names - known:
            checkpoint._where.pop(name)  # the warning that nobody reads
        good_check(checkpoint, wanted, *where)

    return [Edit(families, "rows", rows), Edit(load, "inventory", inventory), Edit(load, "check_headers", check)]


class _RewrittenNames:
    """The names facet with every row of a table passed through a function."""

    def __init__(self, session: Session, rewrite: Any) -> None:
        self._good, self._rewrite = session.names, rewrite
        self.export, self.forward = session.export, session.forward
        self.names = self

    def table(self, rank: int) -> Sequence[NameRow]:
        assert self._good is not None
        rows: Sequence[NameRow] = self._rewrite(self._good, rank)
        return rows


def _rank_0_metadata(session: Session, cell: Cell, world: World) -> Session:
    return _RewrittenNames(session, lambda good, rank: good.table(0))


def _layers_not_globalised(session: Session, cell: Cell, world: World) -> Session:
    def rewrite(good: Any, rank: int) -> list[NameRow]:
        return [replace(row, global_name=row.local) for row in good.table(rank)]

    return _RewrittenNames(session, rewrite)


def _etp_not_passed_on(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["units"].Layout
    good = layout.parse.__func__

    def parse(cls: Any, text: str) -> Any:
        made = good(cls, text)
        return replace(made, etp=made.tp)

    return [Edit(layout, "parse", classmethod(parse))]


FAULTS = (
    Fault(
        id="experts-local-at-pp1",
        bug="B16: miles#1088 review, PP=1 returned before experts were globalised",
        rules=("NAM-001", "NAM-004"),
        also=("RUN-001",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_local_experts_at_pp1,
    ),
    Fault(
        id="every-chunk-is-stage-0",
        bug="B22: slime a952d2f, the provider had no vp_stage",
        rules=("NAM-001", "NAM-003"),
        also=(
            "NAM-002",
            "NAM-004",
            "RUN-001",
        ),
        cell=cell("glm4_moe", "pp2-vpp2"),
        edits=_every_chunk_stage_0,
    ),
    Fault(
        id="custom-layout-ignores-pp",
        bug="B27: megatron-core's offset for a layout string ignores the pp_rank it is given",
        rules=("NAM-001", "NAM-003"),
        also=("RUN-001",),
        cell=cell("qwen3_moe", "pp2", layers=6, layout="Ett|tt|t|tL", vpp=2),
        edits=_custom_layout_ignores_pp,
    ),
    Fault(
        id="expert-bias-unmapped",
        bug="B24: Megatron-Bridge#4657, the bias stays zero behind a warning",
        rules=("NAM-001", "NAM-005", "EXP-001", "LOD-001"),
        also=(
            "EXP-006",
            "FWD-001",
            "LOD-002",
        ),
        cell=cell("glm4_moe", "pp2"),
        edits=_bias_unmapped,
    ),
    Fault(
        id="metadata-of-rank-0",
        bug="SkyRL#1816: every rank's buffer sliced with rank 0's names and shapes",
        rules=("NAM-001", "NAM-005"),
        also=(
            "NAM-002",
            "NAM-003",
        ),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_rank_0_metadata,
    ),
    Fault(
        id="layers-not-globalised",
        bug="B23: NeMo-RL#3903, tensors of two layers under one global name",
        rules=("NAM-002",),
        also=("NAM-003",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_layers_not_globalised,
    ),
    Fault(
        id="etp-not-passed-on",
        bug="B5 in kind: slime#1737, miles#803: one runtime field is not passed on, and its default runs",
        rules=("TOP-001",),
        also=("LOD-001", "NAM-004"),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4),
        edits=_etp_not_passed_on,
    ),
)
