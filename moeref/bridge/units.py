"""The global tensors of a model, and where each lies: what exists, whatever the layout, and what one rank holds.

A `Unit` is one global Megatron tensor. `units` lists them in the one canonical order (embedding, layers, head) that no
layout changes. `Placed` is a unit's shard on one rank, under its local name. Layers go from local to global by PP and
VPP, experts by EP, each independently of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from moeref import families
from moeref.bridge.blocks import Block, BridgeError, padded_vocab, shard_blocks
from moeref.families import Model, Row, Spelling
from moeref.layout import Coords, Layout, Stages

#: Megatron-LM's default `make_vocab_size_divisible_by`.
VOCAB_DIVISIBLE_BY = 128


@dataclass(frozen=True)
class HFTensor:
    """A full Hugging Face tensor: its name, shape and dtype ("float32", "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Unit:
    """One global Megatron tensor and the Hugging Face tensors whose elements it holds."""

    name: str
    row: Row
    layer: int | None
    expert: int | None
    hf: tuple[HFTensor, ...]
    dtype: str
    exports: bool = True  # False for a replica that no export reads: a tied head on the last stage


@dataclass(frozen=True)
class Placed:
    """A unit's shard on one rank."""

    unit: Unit
    chunk: int  # virtual stage
    local: str  # name in the chunk's own module
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Table:
    """A model's table under one layout and spelling. All methods are arithmetic: no module, no collective."""

    model: Model
    layout: Layout
    spelling: Spelling = field(default_factory=Spelling)
    divisible_by: int = VOCAB_DIVISIBLE_BY
    #: What was worked out before, by row (kept alive by `_rows`): shards by part, units by layer and expert.
    _shards: dict[tuple[int, int, int | None], tuple[tuple[int, ...], tuple[Block, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _units: dict[tuple[int, int | None, int | None], Unit] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    #: What `placed` said, by (pp, ep, tp, etp): data-parallel replicas hold the same.
    _placed: dict[tuple[int, int, int, int], tuple[Placed, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _ = self.stages
        self.layout.experts(0, self.model.experts)
        if self.model.heads % self.layout.tp:
            raise BridgeError(
                f"{self.model.family}: {self.model.heads} attention heads do not divide over tp={self.layout.tp} "
                f"(layout {self.layout.text})"
            )

    @functools.cached_property
    def stages(self) -> Stages:
        """The decoder layers of every (pp, vp). Raises LayoutError if they cannot be split so."""
        return self.layout.stages(self.model.num_layers, mtp=self.model.mtp_layers)

    @functools.cached_property
    def _pp_of(self) -> dict[int, int]:
        found = {layer: pp for (pp, _), layers in self.stages.layers.items() for layer in layers}
        if self.stages.mtp is not None:
            found |= dict.fromkeys(self._mtp_layers, self.stages.mtp[0])
        return found

    @functools.cached_property
    def _rows(self) -> tuple[Row, ...]:
        return families.rows(self.model)

    @functools.cached_property
    def _mtp_layers(self) -> range:
        """The MTP layers as files number them."""
        return range(self.model.num_layers, self.model.num_layers + self.model.mtp_layers)

    def _unit(self, row: Row, layer: int | None, expert: int | None) -> Unit:
        key = id(row), layer, expert
        if key not in self._units:
            self._units[key] = self._made(row, layer, expert)
        return self._units[key]

    def _made(self, row: Row, layer: int | None, expert: int | None) -> Unit:
        model, where = self.model, {"layer": layer, "expert": expert}
        mtp = layer in self._mtp_layers
        tensors = (row.fused,) if self.spelling.hf == "fused" and row.fused else row.hf
        dtype = row.dtype or model.param_dtype
        hf = tuple(HFTensor(t.name.format(**where), tuple(model.dims[d] for d in t.dims), dtype) for t in tensors)
        number = layer - model.num_layers if layer is not None and mtp else layer
        name = self.spelling.megatron(row, mtp=mtp).format(layer=number, expert=expert)
        if model.tied and name == "output_layer.weight":
            embedding = self._unit(self._rows[0], None, None)
            return Unit(name, row, None, None, embedding.hf, dtype, exports=False)
        return Unit(name, row, layer, expert, hf, dtype)

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units in canonical order. The order is the export order and does not depend on the layout."""
        rows = self._rows
        out = [self._unit(r, None, None) for r in rows if r.on == "first"]
        for layer in range(self.model.num_layers + self.model.mtp_layers):
            out += [u for _, u in self._layer_units(layer, range(self.model.experts))]
        return (*out, *(self._unit(r, None, None) for r in rows if r.on == "last"))

    def _layer_units(self, layer: int, experts: range) -> Iterator[tuple[int, Unit]]:
        """(local expert or 0, unit) of one layer; rows of one expert stay together, as Hugging Face saves them."""
        rows = [r for r in self._rows if r.present(self.model, layer)]
        for row in rows:
            if "{expert}" not in row.megatron:
                yield 0, self._unit(row, layer, None)
        for local, expert in enumerate(experts):
            for row in rows:
                if "{expert}" in row.megatron:
                    yield local, self._unit(row, layer, expert)

    def local_name(self, unit: Unit, local_layer: int, local_expert: int) -> str:
        """The unit's name inside the chunk that holds it as `local_layer` and `local_expert`."""
        mtp = unit.layer in self._mtp_layers
        return self.spelling.megatron(unit.row, mtp=mtp).format(layer=local_layer, expert=local_expert)

    def shard(self, unit: Unit, part: int) -> tuple[tuple[int, ...], tuple[Block, ...]]:
        """Shape and blocks of the shard that TP rank (ETP rank for an expert) `part` holds of `unit`."""
        # A Hugging Face tensor of one expert is cut alike for all of them.
        alike = unit.expert is None or (self.spelling.hf == "per_expert" and "{expert}" in unit.row.hf[0].name)
        layout, key = self.layout, (id(unit.row), part, None if alike else unit.expert)
        if key in self._shards:
            return self._shards[key]
        try:
            found = shard_blocks(
                self.model,
                unit.row,
                part,
                layout.tp if unit.expert is None else layout.etp,
                padded=padded_vocab(self.model, layout.tp, self.divisible_by),
                expert=unit.expert,
                fused=self.spelling.hf == "fused" and unit.row.fused is not None,
            )
        except BridgeError as error:
            raise BridgeError(f"{error} (layout {layout.text})") from None
        self._shards[key] = found
        return found

    def _place(self, unit: Unit, chunk: int, local: str, at: Coords) -> Placed:
        return Placed(unit, chunk, local, *self.shard(unit, at.tp if unit.expert is None else at.etp))

    def placed(self, rank: int) -> tuple[Placed, ...]:
        """Every tensor that `rank` holds, chunk by chunk, in canonical order."""
        at = self.layout.coords(rank)
        key = at.pp, at.ep, at.tp, at.etp
        if key not in self._placed:
            self._placed[key] = self._placed_at(at)
        return self._placed[key]

    def _placed_at(self, at: Coords) -> tuple[Placed, ...]:
        layout, rows, stages = self.layout, self._rows, self.stages
        experts = layout.experts(at.ep, self.model.experts)
        out: list[Placed] = []
        for vp in range(layout.vpp):
            # Megatron builds the embedding once more where the MTP layers are.
            if layout.has_embedding(at.pp, vp) or stages.mtp == (at.pp, vp):
                out += [self._place(self._unit(r, None, None), vp, r.megatron, at) for r in rows if r.on == "first"]
            for local_layer, layer in enumerate(stages.layers[at.pp, vp]):
                for local_expert, unit in self._layer_units(layer, experts):
                    out.append(self._place(unit, vp, self.local_name(unit, local_layer, local_expert), at))
            if stages.mtp == (at.pp, vp):
                for number, layer in enumerate(self._mtp_layers):
                    for local_expert, unit in self._layer_units(layer, experts):
                        out.append(self._place(unit, vp, self.local_name(unit, number, local_expert), at))
            last = [self._unit(r, None, None) for r in rows if r.on == "last" and self._last(r) == (at.pp, vp)]
            # Megatron allocates no head weight where the embedding sits in the same chunk.
            together = layout.has_embedding(at.pp, vp)
            out += [self._place(u, vp, u.name, at) for u in last if u.exports or not together]
        return tuple(out)

    def _last(self, row: Row) -> tuple[int, int]:
        """The stage (pp, vp) of a row after the layers. With MTP the final norm is where the last decoder layer is."""
        if self.model.mtp_layers and row.how == "replicate":
            return self.stages.owner(self.model.num_layers - 1)
        return self.layout.pp - 1, self.layout.vpp - 1

    def owners(self, unit: Unit) -> tuple[int, ...]:
        """The ranks that together hold `unit`, in TP (ETP) order, each shard once: DP, CP and replicas at 0."""
        layout = self.layout
        if unit.layer is not None:
            pp = self._pp_of[unit.layer]
        else:
            pp = 0 if unit.row.on == "first" else self._last(unit.row)[0]
        if unit.expert is not None:
            ep = unit.expert // (self.model.experts // layout.ep)
            shards = 1 if unit.row.how == "replicate" else layout.etp
            return tuple(layout.expert_rank_of(etp=etp, ep=ep, pp=pp) for etp in range(shards))
        shards = 1 if unit.row.how == "replicate" else layout.tp
        return tuple(layout.rank_of(tp=tp, pp=pp) for tp in range(shards))
