"""moeref as a target: the kit's first customer, and the only file of the kit that imports it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeref import bridge, families
from moeref.bridge import blocks, checkpoint, loader, units
from moeref.exporter import plan, stream
from moeref.layout import Layout
from moeref_conformance.api import Cell, Claims, Info, NameRow, TensorMeta, World

if TYPE_CHECKING:
    import torch

    from moeref.megatron import Built


#: The modules that `faulty` edits to re-create real bugs. They are looked up at call time, so an edit takes effect.
ROOMS = {
    "blocks": blocks,
    "bridge": bridge,
    "checkpoint": checkpoint,
    "families": families,
    "loader": loader,
    "plan": plan,
    "stream": stream,
    "units": units,
}


class _Names:
    def __init__(self, table: units.Table) -> None:
        self._table = table

    def table(self, rank: int) -> Sequence[NameRow]:
        return [
            NameRow(
                chunk=placed.chunk,
                local=placed.local,
                global_name=placed.unit.name,
                hf=tuple(t.name for t in placed.unit.hf) if placed.unit.exports else (),
                shape=placed.shape,
                dtype=placed.unit.dtype,
            )
            for placed in self._table.placed(rank)
        ]


class _Export:
    def __init__(self, built: Built, table: units.Table, rank: int) -> None:
        self._built, self._table, self._rank = built, table, rank

    def chunks(self) -> Sequence[torch.nn.Module]:
        return self._built.chunks

    def load(self, checkpoint: Path) -> None:
        loader.load(self._built.table, self._rank, self._built.chunks, checkpoint)

    def plan(self) -> Sequence[TensorMeta]:
        loader.bind(self._table, self._rank, self._built.chunks)
        return [_meta(t) for t in plan.Plan(self._table).tensors]

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        for tensor, full in stream.export(plan.Plan(self._table), self._rank, self._built.chunks):
            yield _meta(tensor), full
            del full


def _meta(tensor: units.HFTensor) -> TensorMeta:
    return TensorMeta(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)


class _Forward:
    def __init__(self, built: Built) -> None:
        self._built = built

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        from moeref import megatron

        return megatron.logits(self._built.chunks, self._built.table, tokens_BS)


class _Session:
    def __init__(self, names: _Names, export: _Export | None = None, forward: _Forward | None = None) -> None:
        self.names, self.export, self.forward = names, export, forward


class MoerefTarget:
    """moeref, judged like anybody else."""

    info = Info(name="moeref", version=importlib.metadata.version("moeref"))
    claims = Claims(
        facets=frozenset({"names", "export", "forward"}),
        families=frozenset(families.FAMILIES),
        worlds=frozenset({"static", "gloo"}),
        spellings=frozenset({"per_expert", "fused"}),
        norms=frozenset({"apart", "fused"}),
        mtp=2,
        experts=frozenset({"sequential", "grouped"}),
        dispatchers=frozenset({"alltoall", "allgather"}),
    )

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[_Session]:
        layout, model = Layout.parse(cell.layout.text), families.read(world.hf_config, cell.dtype)
        spelling = families.Spelling(norms=cell.norms, experts=cell.experts, hf=cell.spelling)  # type: ignore[arg-type]
        table = units.Table(model, layout, spelling)
        if world.kind == "static":
            yield _Session(_Names(table))
            return
        from moeref import megatron

        table = units.Table(model, layout, replace(spelling, mtp=megatron.mtp_name()))
        rank = megatron.initialise(layout)
        try:
            built = megatron.build(
                model,
                layout,
                rank,
                device=world.device,
                norms=cell.norms,
                experts=cell.experts,
                overrides={"moe_token_dispatcher_type": cell.dispatcher},
            )
            yield _Session(_Names(table), _Export(built, table, rank), _Forward(built))
        finally:
            megatron.shut_down()


def target() -> MoerefTarget:
    """The target that `--target moeref` names."""
    return MoerefTarget()


__all__ = ["ROOMS", "MoerefTarget", "target"]
