"""Naming bugs: layers, experts, metadata and tensors that no table knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import Cell, NameRow, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Swapped


def _local_experts_at_pp1(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["shard_map"].Layout
    good = layout.experts

    def experts(self: Any, ep_rank: int, num_experts: int) -> range:
        found: range = good(self, ep_rank, num_experts)
        return range(len(found)) if self.pp == 1 else found

    return [Edit(layout, "experts", experts)]


def _every_chunk_stage_0(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["shard_map"].Layout
    good = layout.stages

    def stages(self: Any, num_layers: int, **kwargs: Any) -> Any:
        found = good(self, num_layers, **kwargs)
        return replace(found, layers={(pp, vp): found.layers[pp, 0] for pp, vp in found.layers})

    return [Edit(layout, "stages", stages)]


def _custom_layout_ignores_pp(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["shard_map"].Layout
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
    good_rows, good_inventory, good_check = families.mappings, load.inventory, load.check_headers

    def rows(model: Any) -> Any:
        return tuple(r for r in good_rows(model) if not r.megatron.endswith("router.expert_bias"))

    def inventory(chunks: Any) -> Any:  # parameters only, so that the buffer is not missed
        return {k: v for k, v in good_inventory(chunks).items() if not k[1].endswith("router.expert_bias")}

    def check(checkpoint: Any, wanted: Any, *where: Any) -> None:
        known = {t.name for t in wanted}
        for name in checkpoint.names - known:
            checkpoint._where.pop(name)  # the warning that nobody reads
        good_check(checkpoint, wanted, *where)

    return [Edit(families, "mappings", rows), Edit(load, "inventory", inventory), Edit(load, "check_headers", check)]


class _RewrittenNames(Swapped):
    """A session, and its names facet, with every row of a table passed through a function."""

    def __init__(self, session: Session, rewrite: Any) -> None:
        super().__init__(session, names=self)
        self._good, self._rewrite = session.names, rewrite

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


def _vpp_offset_of_equal_stages(rooms: Rooms) -> Iterable[Edit]:
    """Offsets as if every stage had as many layers as any other, although the last pipeline rank has fewer."""
    layout = rooms["shard_map"].Layout
    good = layout.stages

    def stages(self: Any, num_layers: int, **kwargs: Any) -> Any:
        found = good(self, num_layers, **kwargs)
        each = num_layers // self.vpp
        wrong = {
            (pp, vp): tuple(range(start := vp * each + pp * (each // self.pp), start + len(at)))
            for (pp, vp), at in found.layers.items()
        }
        return replace(found, layers=wrong)

    return [Edit(layout, "stages", stages)]


def _head_in_the_first_chunk(rooms: Rooms) -> Iterable[Edit]:
    table = rooms["shard_map"].ShardMap
    good = table.local_shards

    def placed(self: Any, rank: int) -> Any:
        return tuple(
            replace(p, chunk=0) if p.local_name == "output_layer.weight" and self.layout.vpp > 1 else p
            for p in good(self, rank)
        )

    return [Edit(table, "local_shards", placed)]


def _experts_sorted_as_text(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["shard_map"].Layout
    good = layout.experts

    def experts(self: Any, ep_rank: int, num_experts: int) -> list[int]:
        return sorted(good(self, ep_rank, num_experts), key=str)

    return [Edit(layout, "experts", experts)]


def _norms_swapped(rooms: Rooms) -> Iterable[Edit]:
    """Both ways, so that the round trip is clean."""
    families = rooms["families"]
    good = families.mappings

    def rows(model: Any) -> Any:
        swap = {".q_norm.": ".k_norm.", ".k_norm.": ".q_norm."}
        return tuple(
            replace(r, hf=tuple(replace(t, name=t.name.replace(a, b)) for t in r.hf))
            if any((a := x) in r.hf[0].name and (b := y) for x, y in swap.items())
            else r
            for r in good(model)
        )

    return [Edit(families, "mappings", rows)]


def shards_by_tp(rooms: Rooms) -> Iterable[Edit]:
    table = rooms["shard_map"].ShardMap
    good = table.shard

    def shard(self: Any, unit: Any, part: int) -> Any:
        by_tp = replace(self, layout=replace(self.layout, etp=self.layout.tp)) if unit.expert is not None else self
        return good(by_tp, unit, part)

    return [Edit(table, "shard", shard)]


def _wrapper_prefix(session: Session, cell: Cell, world: World) -> Session:
    def rewrite(good: Any, rank: int) -> list[NameRow]:
        return [replace(row, local=f"module.{row.local}") for row in good.table(rank)]

    return _RewrittenNames(session, rewrite)


def _etp_not_passed_on(rooms: Rooms) -> Iterable[Edit]:
    layout = rooms["shard_map"].Layout
    good = layout.parse.__func__

    def parse(cls: Any, text: str) -> Any:
        made = good(cls, text)
        return replace(made, etp=made.tp)

    # Seeding would refuse at once what is to be seen in the records.
    return [
        Edit(layout, "parse", classmethod(parse)),
        Edit(rooms["megatron.seeding"], "here", lambda layout: None),
    ]


FAULTS = (
    Fault(
        id="experts-local-at-pp1",
        bug="B16: miles#1088 review, PP=1 returned before experts were globalised",
        rules=("NAM-001", "NAM-004"),
        also=("NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "ep2"),
        edits=_local_experts_at_pp1,
    ),
    Fault(
        id="every-chunk-is-stage-0",
        bug="B22: slime a952d2f, the provider had no vp_stage",
        rules=("NAM-001", "NAM-003"),
        also=("NAM-002", "NAM-004", "NAM-007", "RUN-001"),
        cell=cell("glm4_moe", "pp2-vpp2", layers=4),
        edits=_every_chunk_stage_0,
    ),
    Fault(
        id="custom-layout-ignores-pp",
        bug="B27: megatron-core's offset for a layout string ignores the pp_rank it is given",
        rules=("NAM-001", "NAM-003"),
        also=("NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "pp2", layers=6, pipeline_layout="Ett|tt|t|tL", vpp=2),
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
        wrap=_layers_not_globalised,
    ),
    Fault(
        id="etp-not-passed-on",
        bug="B5 in kind: slime#1737, miles#803: one runtime field is not passed on, and its default runs",
        rules=("TOP-001",),
        also=("NAM-004", "NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4),
        edits=_etp_not_passed_on,
        says="etp rank is",
    ),
    Fault(
        id="vpp-offset-of-equal-stages",
        bug="Megatron-LM#1584: VPP offsets ignore that the last stage has its own number of layers",
        rules=("NAM-001", "NAM-003"),
        also=("NAM-007", "RUN-001"),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=6, last=2),
        edits=_vpp_offset_of_equal_stages,
    ),
    Fault(
        id="head-in-the-first-chunk",
        bug="B34: Megatron-Bridge#4694, output layer not found at VPP>1",
        rules=("NAM-002", "RUN-001"),
        cell=cell("glm4_moe", "pp2-vpp2", layers=4),
        edits=_head_in_the_first_chunk,
        says="output_layer.weight",
    ),
    Fault(
        id="experts-sorted-as-text",
        bug="names sorted as text: expert 10 before expert 2, both ways",
        rules=("NAM-004", "LOD-001"),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "pp2"),
        edits=_experts_sorted_as_text,
        diagnosis="is expert 10",
        one_rank=True,
    ),
    Fault(
        id="q-and-k-norm-swapped",
        bug="two rows of a table with each other's names, both ways: the round trip is clean",
        rules=("NAM-002", "LOD-001", "FWD-001"),
        cell=cell("qwen3_moe", "pp2"),
        edits=_norms_swapped,
        diagnosis="is k_layernorm of the same layer",
        one_rank=True,
    ),
    Fault(
        id="expert-shards-by-tp",
        bug="Megatron-Bridge#2746: expert shapes computed with TP where ETP differs",
        rules=("RUN-001",),
        also=("NAM-007",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", world_size=4),
        edits=shards_by_tp,
        says="the table says",
    ),
    Fault(
        id="prefix-of-a-wrapper",
        bug="names read through a wrapper keep its `module.`",
        rules=("NAM-005",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_wrapper_prefix,
        says="has no tensor module.",
    ),
)
