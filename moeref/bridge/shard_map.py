"""The global parameters of a model, and which rank holds which shard of each under a layout.

A `GlobalParam` is one Megatron parameter of the whole model; `global_params` lists them in the one canonical order
(embedding, layers, head), which no layout changes. A `LocalShard` is a rank's part of one, under its local name. Layers
go from local to global by PP and VPP, experts by EP, each on its own.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from moeref import families
from moeref.bridge.regions import BridgeError, CopyRegion, Shard, padded_vocab, shard_regions
from moeref.bridge.uncollected import uncollected
from moeref.dtypes import DTYPES
from moeref.families import ExpertFormat, HFPattern, Model, ParamMapping, SpecNames
from moeref.layout import Coords, Layout, Stages

#: Megatron-LM's default `make_vocab_size_divisible_by`.
VOCAB_DIVISIBLE_BY = 128


def hashed(*parts: object) -> int:
    """63 bits of a hash of the `repr` of `parts`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class HFTensor(NamedTuple):
    """A full Hugging Face tensor: its name, shape and dtype ("float32", "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class GlobalParam(NamedTuple):
    """One Megatron parameter of the whole model and the Hugging Face tensors whose elements it holds."""

    name: str
    mapping: ParamMapping
    layer: int | None  # by global number, MTP layers after the decoder's; None outside the layers
    expert: int | None  # by global number; None for what is of no expert
    hf: tuple[HFTensor, ...]  # in the order of the mapping's `hf`, by which `CopyRegion.tensor` counts
    dtype: str
    exports: bool = True  # False for a copy that no export reads: a tied head on the last stage


class LocalShard(NamedTuple):
    """A rank's shard of a parameter."""

    param: GlobalParam
    chunk: int  # virtual stage
    local_name: str  # in the chunk's own module
    shape: tuple[int, ...]
    regions: tuple[CopyRegion, ...]


T = TypeVar("T")
#: A name in pieces, with the expert's number between them; in one piece if it has none.
_Pieces = tuple[str, ...]


class LayerParams:
    """The parameters of one mapping in one layer: one, or one for every expert. Experts differ in numbers in names."""

    def __init__(self, mapping: ParamMapping, layer: int | None, name: str, hf: tuple[HFTensor, ...]) -> None:
        self.mapping, self.layer = mapping, layer
        self.of_experts = "{expert}" in mapping.megatron
        self.own = "{expert}" in hf[0].name  # whether every expert has Hugging Face tensors of its own
        self._name, self._hf = _pieces(name), [(_pieces(t.name), t) for t in hf]
        self._made: dict[int | None, GlobalParam] = {}

    def of(self, experts: range) -> Sequence[int | None]:
        """`experts`, or None for a parameter that is of none."""
        return experts if self.of_experts else (None,)

    def params(self, experts: Iterable[int | None]) -> list[GlobalParam]:
        """The parameters of these experts, the same objects for every call. Of no expert: (None,)."""
        made = self._made
        return [made.get(expert) or self._make(expert) for expert in experts]

    def _make(self, expert: int | None) -> GlobalParam:
        text = str(expert)
        name = text.join(self._name)
        hf = tuple([HFTensor(text.join(n), t.shape, t.dtype) for n, t in self._hf]) if self.own else self._shared
        made = GlobalParam(name, self.mapping, self.layer, expert, hf, hf[0].dtype)
        self._made[expert] = made
        return made

    @functools.cached_property
    def _shared(self) -> tuple[HFTensor, ...]:
        return tuple(tensor for _, tensor in self._hf)


def _one_expert_after_the_other(layer: Sequence[LayerParams], of: Callable[[LayerParams], list[T]]) -> Iterator[T]:
    """`of` all mappings of a layer, as Hugging Face saves them: what is of no expert, then all of the first expert."""
    for params in layer:
        if not params.of_experts:
            yield from of(params)
    for of_expert in zip(*[of(params) for params in layer if params.of_experts], strict=True):
        yield from of_expert


def _pieces(name: str) -> _Pieces:
    return tuple(name.split("{expert}"))


@dataclass(frozen=True)
class ShardMap:
    """Where every parameter of a model lies under one layout. All methods are arithmetic: no module, no collective.

    names: how Megatron names parameters. expert_format: `per_expert` as in most published files, `fused` as in
    transformers 5's memory, or `fused_decoder`. divisible_by: the vocabulary is padded to a multiple of this times TP.

    Raises LayoutError for layers or experts that the layout does not divide, and BridgeError for attention heads.
    """

    model: Model
    layout: Layout
    names: SpecNames = field(default_factory=SpecNames)
    expert_format: ExpertFormat = "per_expert"
    divisible_by: int = VOCAB_DIVISIBLE_BY
    #: Caches: shards by mapping, TP or ETP rank and expert; parameters by layer (None: outside the layers); the shards
    #: of a rank by (pp, ep, tp, etp), as data-parallel replicas hold the same; owners by PP and EP rank.
    _shards: dict[tuple[ParamMapping, int, int | None], Shard] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _layers: dict[int | None, tuple[LayerParams, ...]] = field(
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
                f"{self.model.family}: {self.model.heads} attention heads do not divide over tp={self.layout.tp}; "
                f"use a tp that divides {self.model.heads} (layout {self.layout.text})"
            )

    def for_checkpoint(self, names: set[str]) -> ShardMap:
        """The map in the expert format of a checkpoint whose tensors have these `names`."""
        decoder, mtp = (self._has_fused(names, of) for of in (range(self.model.num_layers), self._mtp_layers))
        if mtp or (decoder and not self._mtp_layers):
            return self.in_format("fused")
        return self.in_format("fused_decoder" if decoder else "per_expert")

    def _has_fused(self, names: set[str], layers: range) -> bool:
        """Whether any of `names` is a tensor of all experts of one of these layers."""
        fused = {self._hf_name(m.fused, layer) for m in self._mappings if m.fused for layer in layers}
        return not names.isdisjoint(fused)

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

    def _layer(self, layer: int | None) -> tuple[LayerParams, ...]:
        """The parameters of a layer, or those outside the layers."""
        if layer not in self._layers:
            present = (m for m in self._mappings if m.present(self.model, layer))
            self._layers[layer] = tuple(self._made(mapping, layer) for mapping in present)
        return self._layers[layer]

    def _made(self, mapping: ParamMapping, layer: int | None) -> LayerParams:
        model, mtp = self.model, layer in self._mtp_layers
        tensors = (mapping.fused,) if mapping.fused and self._is_fused(layer) else mapping.hf
        dtype = mapping.dtype or model.param_dtype
        hf = (HFTensor(self._hf_name(t, layer), self._shape(t), dtype) for t in tensors)
        number = layer - model.num_layers if layer is not None and mtp else layer
        return LayerParams(mapping, layer, _in_layer(self.names.of(mapping, mtp=mtp), number), tuple(hf))

    def _is_fused(self, layer: int | None) -> bool:
        """Whether one Hugging Face tensor holds all experts of `layer`."""
        of_decoder = self.expert_format == "fused_decoder" and layer not in self._mtp_layers
        return of_decoder or self.expert_format == "fused"

    def _shape(self, tensor: HFPattern) -> tuple[int, ...]:
        return tuple(self.model.dims[dim] for dim in tensor.dims)

    def _hf_name(self, tensor: HFPattern, layer: int | None) -> str:
        """The name in `layer`. MTP layers follow the decoder's, or are counted apart."""
        if self.model.mtp_apart and layer is not None and layer in self._mtp_layers:
            _, within, rest = tensor.name.partition(".layers.")
            return _in_layer(f"mtp.layers.{rest}" if within else tensor.name, layer - self.model.num_layers)
        return _in_layer(tensor.name, layer)

    def _outside(self, mapping: ParamMapping) -> GlobalParam:
        """The parameter of a mapping outside the layers."""
        (param,) = next(one for one in self._layer(None) if one.mapping is mapping).params((None,))
        if self.model.tied and param.name == "output_layer.weight":
            embedding = next(self._outside(m) for m in self._mappings if m.where == "first")
            return param._replace(hf=embedding.hf, exports=False)
        return param

    @functools.cached_property
    @uncollected
    def global_params(self) -> tuple[GlobalParam, ...]:
        """All parameters in canonical order. The order is the export order and does not depend on the layout."""
        return tuple(self._ordered(range(self.model.experts)))

    def _ordered(self, experts: range) -> Iterator[GlobalParam]:
        """All parameters, of each layer's experts only these."""
        mappings = self._mappings
        yield from (self._outside(m) for m in mappings if m.where == "first")
        for layer in range(self.model.num_layers + self.model.mtp_layers):
            yield from _one_expert_after_the_other(self._layer(layer), lambda one: one.params(one.of(experts)))
        yield from (self._outside(m) for m in mappings if m.where == "last")

    def hf_sizes(self) -> tuple[int, int, int]:
        """Hugging Face tensors, their elements, and their bytes. The experts of a layer are alike."""
        alike: dict[str, tuple[int, int, int]] = {}
        for param in self._ordered(range(1)):
            times = self.model.experts if self._has_own(param) else 1
            for one in param.hf if param.exports else ():
                elements = times * math.prod(one.shape)
                alike[one.name] = times, elements, elements * DTYPES[one.dtype].bytes
        tensors, elements, size = (sum(column) for column in zip(*alike.values(), strict=True))
        return tensors, elements, size

    def _has_own(self, param: GlobalParam) -> bool:
        """Whether every expert has Hugging Face tensors of its own for this parameter."""
        mapping = param.mapping
        return "{expert}" in mapping.hf[0].name and not (mapping.fused and self._is_fused(param.layer))

    def kind(self, param: GlobalParam) -> tuple[ParamMapping, int | None]:
        """Parameters of one kind are cut alike: every expert with tensors of its own, in every layer."""
        return param.mapping, None if self._has_own(param) else param.expert

    def shard(self, param: GlobalParam, part: int) -> Shard:
        """The shard that TP rank (ETP rank for an expert) `part` holds of `param`."""
        mapping, expert = self.kind(param)
        return self._shard(mapping, part, expert)

    def _shard(self, mapping: ParamMapping, part: int, expert: int | None) -> Shard:
        """`expert` is None where experts have Hugging Face tensors of their own: these are cut alike in all layers."""
        key = mapping, part, expert
        if key not in self._shards:
            self._shards[key] = self._cut(mapping, part, expert)
        return self._shards[key]

    def _cut(self, mapping: ParamMapping, part: int, expert: int | None) -> Shard:
        layout = self.layout
        try:
            return shard_regions(
                self.model,
                mapping,
                part,
                layout.etp if "{expert}" in mapping.megatron else layout.tp,
                padded=padded_vocab(self.model, layout.tp, self.divisible_by),
                expert=expert,
                fused=expert is not None and mapping.fused is not None,
            )
        except BridgeError as error:
            raise BridgeError(f"{error} (layout {layout.text})") from None

    def position(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, ep, tp, etp) of `rank`. Ranks of one position hold the same shards."""
        at = self.layout.coords(rank)
        return at.pp, at.ep, at.tp, at.etp

    @uncollected
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
        has_embedding, has_mtp = layout.has_embedding(at.pp, vp), stages.mtp == (at.pp, vp)
        # Megatron builds the embedding once more where the MTP layers are.
        for mapping in mappings if has_embedding or has_mtp else ():
            if mapping.where == "first":
                param = self._outside(mapping)
                yield LocalShard(param, vp, mapping.megatron, *self.shard(param, at.tp))
        for layers in (stages.layers[at.pp, vp], self._mtp_layers if has_mtp else ()):
            for local_layer, layer in enumerate(layers):
                yield from self._layer_shards(layer, local_layer, vp, at)
        for mapping in mappings:
            if mapping.where == "last" and self._last_stage(mapping) == (at.pp, vp):
                param = self._outside(mapping)
                # Megatron allocates no head weight where the embedding sits in the same chunk.
                if param.exports or not has_embedding:
                    yield LocalShard(param, vp, param.name, *self.shard(param, at.tp))

    def _layer_shards(self, layer: int, local_layer: int, chunk: int, at: Coords) -> Iterator[LocalShard]:
        """The shards of a layer, which is `local_layer` in its chunk."""
        experts, mtp = self.layout.experts(at.ep, self.model.experts), layer in self._mtp_layers

        def held(one: LayerParams) -> list[LocalShard]:
            name = _pieces(_in_layer(self.names.of(one.mapping, mtp=mtp), local_layer))
            part = at.etp if one.of_experts else at.tp
            alike = self._shard(one.mapping, part, None) if one.own or not one.of_experts else None
            return [
                LocalShard(p, chunk, str(n).join(name), *(alike or self._shard(one.mapping, part, p.expert)))
                for n, p in enumerate(one.params(one.of(experts)))
            ]

        return _one_expert_after_the_other(self._layer(layer), held)

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


def hf_tensors(shard_map: ShardMap) -> list[HFTensor]:
    """Every Hugging Face tensor of the model once, in export order."""
    return list({t.name: t for p in shard_map.global_params if p.exports for t in p.hf}.values())


def _in_layer(name: str, layer: int | None) -> str:
    return name.replace("{layer}", str(layer))
