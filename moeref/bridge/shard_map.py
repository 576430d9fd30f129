"""The global parameters of a model, and which rank holds which shard of each under a layout.

A `GlobalParam` is one Megatron parameter of the whole model; `global_params` lists them in the one canonical order
(embedding, layers, head), which no layout changes. A `LocalShard` is a rank's part of one, under its local name. Layers
go from local to global by PP and VPP, experts by EP, each on its own.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from moeref import families
from moeref.bridge.regions import BridgeError, CopyRegion, Shard, padded_vocab, shard_regions
from moeref.families import ExpertFormat, Model, ParamMapping, SpecNames
from moeref.layout import Coords, Layout, Stages

#: Megatron-LM's default `make_vocab_size_divisible_by`.
VOCAB_DIVISIBLE_BY = 128


def hashed(*parts: object) -> int:
    """63 bits of a hash of the `repr` of `parts`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class HFTensor:
    """A full Hugging Face tensor: its name, shape and dtype ("float32", "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GlobalParam:
    """One Megatron parameter of the whole model and the Hugging Face tensors whose elements it holds."""

    name: str
    mapping: ParamMapping
    layer: int | None
    expert: int | None
    hf: tuple[HFTensor, ...]
    dtype: str
    exports: bool = True  # False for a copy that no export reads: a tied head on the last stage


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard of a parameter."""

    param: GlobalParam
    chunk: int  # virtual stage
    local_name: str  # in the chunk's own module
    shape: tuple[int, ...]
    regions: tuple[CopyRegion, ...]


@dataclass(frozen=True)
class ShardMap:
    """Where every parameter of a model lies under one layout. All methods are arithmetic: no module, no collective.

    names: how Megatron names parameters. expert_format: `per_expert` as in published files, or `fused` as in
    transformers 5's memory. divisible_by: the vocabulary is padded to a multiple of this times TP.
    """

    model: Model
    layout: Layout
    names: SpecNames = field(default_factory=SpecNames)
    expert_format: ExpertFormat = "per_expert"
    divisible_by: int = VOCAB_DIVISIBLE_BY
    #: Caches: shards by mapping, TP or ETP rank and expert; parameters by mapping, layer and expert; the shards of a
    #: rank by (pp, ep, tp, etp), as data-parallel replicas hold the same; owners by PP and EP rank.
    _shards: dict[tuple[ParamMapping, int, int | None], Shard] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _params: dict[tuple[ParamMapping, int | None, int | None], GlobalParam] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _local_shards: dict[tuple[int, int, int, int], tuple[LocalShard, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _owners: dict[tuple[int, int | None, bool], tuple[int, ...]] = field(
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

    def for_checkpoint(self, names: set[str]) -> ShardMap:
        """The map in the expert format of a checkpoint whose tensors have these `names`."""
        layers = range(self.model.num_layers + self.model.mtp_layers)
        fused = {m.fused.name.format(layer=layer) for m in self._mappings if m.fused for layer in layers}
        return self.in_format("per_expert" if names.isdisjoint(fused) else "fused")

    def in_format(self, expert_format: ExpertFormat) -> ShardMap:
        """The map with the Hugging Face side in this expert format; itself if it has that already."""
        return self if expert_format == self.expert_format else replace(self, expert_format=expert_format)

    @functools.cached_property
    def stages(self) -> Stages:
        """The decoder layers of every (pp, vp). Raises LayoutError if they cannot be split so."""
        return self.layout.stages(self.model.num_layers, mtp=self.model.mtp_layers)

    @functools.cached_property
    def digest(self) -> int:
        """63 bits of a hash of everything that decides the shards: model, table, layout, names, expert format and
        vocabulary padding. Ranks that exchange weights must have the same."""
        return hashed(self, self._mappings)

    @functools.cached_property
    def _pp_of(self) -> dict[int, int]:
        pp_of = {layer: pp for (pp, _), layers in self.stages.layers.items() for layer in layers}
        if self.stages.mtp is not None:
            pp_of |= dict.fromkeys(self._mtp_layers, self.stages.mtp[0])
        return pp_of

    @functools.cached_property
    def _mappings(self) -> tuple[ParamMapping, ...]:
        return families.mappings(self.model)

    @functools.cached_property
    def _mtp_layers(self) -> range:
        """The MTP layers as files number them."""
        return range(self.model.num_layers, self.model.num_layers + self.model.mtp_layers)

    def _param(self, mapping: ParamMapping, layer: int | None, expert: int | None) -> GlobalParam:
        key = mapping, layer, expert
        if key not in self._params:
            self._params[key] = self._made(mapping, layer, expert)
        return self._params[key]

    def _made(self, mapping: ParamMapping, layer: int | None, expert: int | None) -> GlobalParam:
        model, where = self.model, {"layer": layer, "expert": expert}
        mtp = layer in self._mtp_layers
        tensors = (mapping.fused,) if self.expert_format == "fused" and mapping.fused else mapping.hf
        dtype = mapping.dtype or model.param_dtype
        hf = tuple(HFTensor(t.name.format(**where), tuple(model.dims[d] for d in t.dims), dtype) for t in tensors)
        number = layer - model.num_layers if layer is not None and mtp else layer
        name = self.names.of(mapping, mtp=mtp).format(layer=number, expert=expert)
        if model.tied and name == "output_layer.weight":
            embedding = next(self._param(m, None, None) for m in self._mappings if m.where == "first")
            return GlobalParam(name, mapping, None, None, embedding.hf, dtype, exports=False)
        return GlobalParam(name, mapping, layer, expert, hf, dtype)

    @functools.cached_property
    def global_params(self) -> tuple[GlobalParam, ...]:
        """All parameters in canonical order. The order is the export order and does not depend on the layout."""
        return tuple(self._ordered(range(self.model.experts)))

    def _ordered(self, experts: range) -> Iterator[GlobalParam]:
        """All parameters, of each layer's experts only these."""
        mappings = self._mappings
        yield from (self._param(m, None, None) for m in mappings if m.where == "first")
        for layer in range(self.model.num_layers + self.model.mtp_layers):
            yield from (param for _, param in self._layer_params(layer, experts))
        yield from (self._param(m, None, None) for m in mappings if m.where == "last")

    def hf_sizes(self) -> tuple[int, int]:
        """The number of Hugging Face tensors, and of their elements. The experts of a layer are alike."""
        alike: dict[str, tuple[int, int]] = {}
        for param in self._ordered(range(1)):
            times = self.model.experts if self._has_own(param) else 1
            alike |= {t.name: (times, times * math.prod(t.shape)) for t in param.hf if param.exports}
        return sum(number for number, _ in alike.values()), sum(elements for _, elements in alike.values())

    def _has_own(self, param: GlobalParam) -> bool:
        """Whether every expert has Hugging Face tensors of its own for this parameter."""
        return self.expert_format == "per_expert" and "{expert}" in param.mapping.hf[0].name

    def _layer_params(self, layer: int, experts: range) -> Iterator[tuple[int, GlobalParam]]:
        """(local expert or 0, parameter) of one layer, one expert after the other, as Hugging Face saves them."""
        mappings = [m for m in self._mappings if m.present(self.model, layer)]
        for mapping in mappings:
            if "{expert}" not in mapping.megatron:
                yield 0, self._param(mapping, layer, None)
        for local, expert in enumerate(experts):
            for mapping in mappings:
                if "{expert}" in mapping.megatron:
                    yield local, self._param(mapping, layer, expert)

    def local_name(self, param: GlobalParam, local_layer: int, local_expert: int) -> str:
        """The parameter's name inside the chunk that holds it as `local_layer` and `local_expert`."""
        mtp = param.layer in self._mtp_layers
        return self.names.of(param.mapping, mtp=mtp).format(layer=local_layer, expert=local_expert)

    def shard(self, param: GlobalParam, part: int) -> Shard:
        """The shard that TP rank (ETP rank for an expert) `part` holds of `param`."""
        # Where every expert has Hugging Face tensors of its own, all experts are cut alike.
        key = param.mapping, part, None if self._has_own(param) else param.expert
        if key not in self._shards:
            self._shards[key] = self._cut(param, part)
        return self._shards[key]

    def _cut(self, param: GlobalParam, part: int) -> Shard:
        layout = self.layout
        try:
            return shard_regions(
                self.model,
                param.mapping,
                part,
                layout.tp if param.expert is None else layout.etp,
                padded=padded_vocab(self.model, layout.tp, self.divisible_by),
                expert=param.expert,
                fused=self.expert_format == "fused" and param.mapping.fused is not None,
            )
        except BridgeError as error:
            raise BridgeError(f"{error} (layout {layout.text})") from None

    def _local_shard(self, param: GlobalParam, chunk: int, local_name: str, at: Coords) -> LocalShard:
        return LocalShard(param, chunk, local_name, *self.shard(param, at.tp if param.expert is None else at.etp))

    def position(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, ep, tp, etp) of `rank`. Ranks of one position hold the same shards."""
        at = self.layout.coords(rank)
        return at.pp, at.ep, at.tp, at.etp

    def local_shards(self, rank: int) -> tuple[LocalShard, ...]:
        """Every tensor that `rank` holds, chunk by chunk, in canonical order."""
        key = self.position(rank)
        if key not in self._local_shards:
            at = self.layout.coords(rank)
            self._local_shards[key] = tuple(s for vp in range(self.layout.vpp) for s in self._chunk_shards(at, vp))
        return self._local_shards[key]

    def _chunk_shards(self, at: Coords, vp: int) -> Iterator[LocalShard]:
        """The shards of virtual stage `vp` on the rank `at`."""
        layout, stages, mappings = self.layout, self.stages, self._mappings
        experts = layout.experts(at.ep, self.model.experts)
        has_embedding, has_mtp = layout.has_embedding(at.pp, vp), stages.mtp == (at.pp, vp)
        # Megatron builds the embedding once more where the MTP layers are.
        for mapping in mappings if has_embedding or has_mtp else ():
            if mapping.where == "first":
                yield self._local_shard(self._param(mapping, None, None), vp, mapping.megatron, at)
        for layers in (stages.layers[at.pp, vp], self._mtp_layers if has_mtp else ()):
            for local_layer, layer in enumerate(layers):
                for local_expert, param in self._layer_params(layer, experts):
                    yield self._local_shard(param, vp, self.local_name(param, local_layer, local_expert), at)
        for mapping in mappings:
            if mapping.where == "last" and self._last_stage(mapping) == (at.pp, vp):
                param = self._param(mapping, None, None)
                # Megatron allocates no head weight where the embedding sits in the same chunk.
                if param.exports or not has_embedding:
                    yield self._local_shard(param, vp, param.name, at)

    def _last_stage(self, mapping: ParamMapping) -> tuple[int, int]:
        """(pp, vp) of a parameter after the layers. With MTP the final norm is with the last decoder layer."""
        if self.model.mtp_layers and mapping.sharding == "replicate":
            return self.stages.owner(self.model.num_layers - 1)
        return self.layout.pp - 1, self.layout.vpp - 1

    def owners(self, param: GlobalParam) -> tuple[int, ...]:
        """The ranks that together hold `param`, in TP (ETP) order, each shard once: DP, CP and replicas at 0."""
        whole = param.mapping.sharding == "replicate"
        if param.layer is not None:
            pp = self._pp_of[param.layer]
        else:
            pp = 0 if param.mapping.where == "first" else self._last_stage(param.mapping)[0]
        ep = None if param.expert is None else param.expert // (self.model.experts // self.layout.ep)
        key = pp, ep, whole
        if key not in self._owners:
            self._owners[key] = self._owners_at(*key)
        return self._owners[key]

    def _owners_at(self, pp: int, ep: int | None, whole: bool) -> tuple[int, ...]:
        layout = self.layout
        if ep is None:
            return tuple(layout.rank_of(tp=tp, pp=pp) for tp in range(1 if whole else layout.tp))
        return tuple(layout.expert_rank_of(etp=etp, ep=ep, pp=pp) for etp in range(1 if whole else layout.etp))
