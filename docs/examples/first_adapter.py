"""A first adapter. The framework it hands to the kit is moeref, through its public functions alone.

Put your own calls where the comments say `yours`; the rest is the same for every framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from moeref_conformance.contract.api import Cell, Claims, Info, NameRow, TensorMeta, World

from moeref import bridge, exporter, families
from moeref.layout import Layout
from moeref.record import Options, Record

if TYPE_CHECKING:
    from moeref.megatron import Built


class Names:
    """Facet `names`: which tensors each rank holds, by arithmetic alone."""

    def __init__(self, shards: bridge.ShardMap) -> None:
        self._shards = shards

    def table(self, rank: int) -> Sequence[NameRow]:
        """One row for every parameter and persistent buffer of `rank`."""
        return [
            NameRow(
                chunk=held.chunk,
                local=held.local_name,
                global_name=held.param.name,
                hf=tuple(t.name for t in held.param.hf) if held.param.exports else (),
                shape=held.shape,
                dtype=held.param.dtype,
            )
            for held in self._shards.local_shards(rank)  # yours
        ]


class Model:
    """Facets `export` and `forward` of one rank's real model. One object may serve several."""

    def __init__(self, built: Built, rank: int) -> None:
        self._built, self._rank = built, rank

    def chunks(self) -> Sequence[torch.nn.Module]:
        """The modules themselves. The kit reads them, and changes weights between exports."""
        return self._built.chunks

    def load(self, checkpoint: Path) -> None:
        """Fill this rank's shards, or raise, naming the tensor that does not fit."""
        shards, chunks = self._built.shard_map, self._built.chunks
        bridge.load(shards, self._rank, chunks, checkpoint)  # yours

    def plan(self) -> Sequence[TensorMeta]:
        """What `stream` will yield, before anything is sent."""
        return [_meta(t) for t in exporter.Plan(self._built.shard_map).tensors]  # yours

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        """The export: on the writer the full tensor, on every other rank None."""
        plan = exporter.Plan(self._built.shard_map)
        for tensor, full in exporter.export(plan, self._rank, self._built.chunks):  # yours
            yield _meta(tensor), full
            del full  # kept here, it would count as memory that the export holds

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """fp32 logits over the unpadded vocabulary on the last stage, None elsewhere."""
        from moeref import megatron

        return megatron.logits(self._built.chunks, self._built.shard_map, tokens_BS)  # yours


def _meta(tensor: bridge.HFTensor) -> TensorMeta:
    return TensorMeta(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)


class Session:
    """One opened cell on one rank. A facet that is not claimed may stay None."""

    def __init__(self, names: Names, model: Model | None = None) -> None:
        self.names, self.export, self.forward = names, model, model


class FirstAdapter:
    """What `--target docs.examples.first_adapter:target` names."""

    info = Info(name="first-adapter", version="1")
    claims = Claims(
        facets=frozenset({"names", "export", "forward"}),
        families=frozenset({"qwen3_moe"}),
        backends=frozenset({"static", "gloo"}),
    )

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:
        """Build the model of `world.hf_config` under `cell.layout`."""
        layout = Layout.parse(cell.layout.text)  # yours, and the next two lines
        model = families.read(world.hf_config, cell.dtype)
        names = Names(bridge.ShardMap(model, layout))
        if world.backend == "static":
            yield Session(names)
            return
        # Only ranks import megatron-core: the world has made torch ready for it by then.
        from moeref import megatron

        rank = megatron.initialise(layout)  # yours
        try:
            asked = Record.of(model, layout, options=Options(dispatcher=cell.dispatcher))
            built = megatron.build(asked, rank, world.device)
            yield Session(names, Model(built, rank))
        finally:
            megatron.shut_down()  # yours


target = FirstAdapter()
