"""Brute force: what every local Megatron tensor of every rank must hold, byte for byte.

Layer numbers come from megatron-core's own functions, coordinates from its RankGenerator (`topology`), and what a local
tensor is made of from the tables of `shares`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell
from moeref_conformance.oracles import beside_vision, gpt_oss, hybrid, mtp_names, shares
from moeref_conformance.oracles.shares import AROUND_MTP, Share, Table
from moeref_conformance.oracles.stages import mtp_stage, stage_layers

_EXPERT_HF = re.compile(r"\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.")
_GATE_HF = re.compile(r"\.(?:mlp|block_sparse_moe)\.(?:gate|router)\.weight$")
_LAYER_HF = re.compile(r"^(?:language_model\.)?model\.layers\.(\d+)\.")
_LAYER_LOCAL = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_MTP_LOCAL = re.compile(r"^mtp\.layers\.(\d+)\.(?:(?:mtp_model_layer|transformer_layer)\.)?(.+)$")
_EXPERT_LOCAL = re.compile(
    r"^mlp\.experts\.(?:local_experts\.(?P<seq>\d+)\.linear_fc[12]\.(?:weight|bias)"
    r"|linear_fc[12]\.(?:weight|bias)(?P<grp>\d+))$"
)


class _Within(NamedTuple):
    """A local name taken apart: the numbers of the layer and the expert in it, and what is left of it in the layer."""

    mtp: bool
    layer: int
    rest: str
    expert: int | None


@cache
def _within(local: str) -> _Within | None:
    """None for what is in no layer."""
    name = plain_local(local)
    mtp = _MTP_LOCAL.match(name)
    match = mtp or _LAYER_LOCAL.match(name)
    if match is None:
        return None
    expert = _EXPERT_LOCAL.match(match[2])
    return _Within(mtp is not None, int(match[1]), match[2], int(expert["seq"] or expert["grp"]) if expert else None)


@dataclass
class ExpectedShard:
    """What a local tensor must hold: `hf` are the Hugging Face tensors, `tensor` the values, made when first asked for.

    `rows` counts the rows that are compared: a padded vocabulary has more, with any content.
    `read` is False for a replica that no export reads (a tied head on the last stage).
    """

    make: Callable[[], torch.Tensor]
    hf: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None
    rows: int | None = None
    read: bool = True

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The values this rank must hold, in the shape of the local tensor."""
        return self.make()


class Unknown(LookupError):
    """A local name that Megatron would not have at this place. `what` is layer, expert or module."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class Placement:
    """The placement of one checkpoint under one layout. `tensors` are the full Hugging Face tensors by name."""

    def __init__(self, cell: Cell, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.cell, self.layout, self.config, self.tensors = cell, cell.layout, config, tensors
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
        self.experts = int(experts or 0)
        self.layers = stage_layers(cell)
        end = max(self.layers, key=lambda stage: (stage[1], stage[0]))
        #: Where the multi-token prediction layers are, and the final norm, which with them follows the last layer.
        self.mtp = mtp_stage(cell) if cell.mtp else (-1, -1)
        self.final = next(s for s, ids in self.layers.items() if cell.layers - 1 in ids) if cell.mtp else end
        self.moe_layers = {hf_numbers(name)[0] for name in tensors if _GATE_HF.search(name)}
        self._prefix = beside_vision.prefix(cell.family)
        self._layer, self._expert = _tables(config, tensors)
        self._mtp_expert = shares.EXPERT if cell.expert_format == "fused_decoder" else self._expert
        self._mtp_layer = {**self._layer, **AROUND_MTP}
        self._coords: dict[int, dict[str, int]] = {}
        self._largest: dict[str, float] = {}

    def largest(self, name: str) -> float:
        """The largest absolute value of a Hugging Face tensor."""
        if name not in self._largest:
            self._largest[name] = float(self.tensors[name].abs().max())
        return self._largest[name]

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's coordinates (`topology.coords`)."""
        if rank not in self._coords:
            self._coords[rank] = topology.coords(self.layout, rank)
        return self._coords[rank]

    def expert_range(self, rank: int) -> range:
        """Global numbers of the experts this rank holds: ep_rank · (E / EP) onwards."""
        each = self.experts // self.layout.ep
        start = self.coords(rank)["ep"] * each
        return range(start, start + each)

    def layer_ids(self, rank: int, chunk: int) -> list[int]:
        """Global layer numbers of one chunk of this rank, in local order; empty for a chunk that does not exist."""
        return self.layers.get((self.coords(rank)["pp"], chunk), [])

    def hf_names(self, rank: int) -> set[str]:
        """All Hugging Face tensors of which this rank holds elements that an export reads; needs no module."""
        pp, experts, last = self.coords(rank)["pp"], self.expert_range(rank), self.layout.pp - 1
        stage_of: dict[int | None, int] = {layer: stage for (stage, _), ids in self.layers.items() for layer in ids}
        names = set()
        for name in self.tensors:
            layer, expert = self.hf_numbers(name)
            if name.endswith(".embed_tokens.weight"):
                stages = {0, self.mtp[0]}
            elif layer is None or name.endswith(".shared_head.head.weight"):
                stages = {self.final[0] if name == f"{self._prefix}model.norm.weight" else last}
            else:
                stages = {stage_of.get(layer, self.mtp[0])}
            if pp in stages and (expert is None or expert in experts):
                names.add(name)
        return names

    def numbers(self, rank: int, chunk: int, local: str) -> tuple[int | None, int | None]:
        """(global layer, global expert) of a local name; None where there is no such number. Raises Unknown."""
        at = _within(local)
        if at is None or (at.mtp and (self.coords(rank)["pp"], chunk) != self.mtp):
            return None, None
        after = list(range(self.cell.layers, self.cell.layers + self.cell.mtp))
        ids = after if at.mtp else self.layer_ids(rank, chunk)
        if at.layer >= len(ids):
            raise Unknown("layer", f"chunk {chunk} of rank {rank} has {len(ids)} layers, so there is no {local}")
        if at.expert is None:
            return ids[at.layer], None
        experts = self.expert_range(rank)
        if at.expert >= len(experts):
            raise Unknown("expert", f"rank {rank} has {len(experts)} experts, so there is no {local}")
        return ids[at.layer], experts[at.expert]

    def shard(self, rank: int, chunk: int, local: str, shape: Sequence[int]) -> ExpectedShard:
        """What this local tensor holds. Raises Unknown.

        `shape` is asked only for the padded rows of a vocabulary, and for norms over all heads, which may be cut.
        """
        at, within = self.coords(rank), _within(local)
        layer, expert = self.numbers(rank, chunk, local)
        if layer is None or within is None:
            return self._outer(plain_local(local), at, chunk, shape)
        if expert is None:
            entry, tp, size = (
                (self._mtp_layer if within.mtp else self._layer).get(within.rest),
                at["tp"],
                self.layout.tp,
            )
        else:
            linear = "linear_" + within.rest.partition("linear_")[2].rstrip("0123456789")
            table = self._mtp_expert if within.mtp else self._expert
            entry, tp, size = table.get(linear), at["etp"], self.layout.expert_tp
        if entry is None:
            raise Unknown("module", f"no Megatron module known to the oracle has a tensor {local}")
        names, make = entry
        sources = tuple(self._need(self._named(layer, name.format(expert))) for name in names)

        def values() -> torch.Tensor:
            full = [self.tensors[source] for source in sources]
            if expert is not None and "{}" not in names[0]:
                full = [of_all[expert] for of_all in full]
            return make(Share(self.config, tp, size, tuple(shape)), *full)

        return ExpectedShard(values, sources, layer, expert)

    def _outer(self, name: str, at: Mapping[str, int], chunk: int, shape: Sequence[int]) -> ExpectedShard:
        """Embedding, final norm and head, at the first and the last stage only."""
        first = (at["pp"], chunk) in ((0, 0), self.mtp)
        last = at["pp"] == self.layout.pp - 1 and chunk == max(c for _, c in self.layers)
        tied = bool(self.config.get("tie_word_embeddings"))
        if name == "embedding.word_embeddings.weight" and first:
            return self._vocabulary(f"{self._prefix}model.embed_tokens.weight", at["tp"], shape, read=True)
        if name == "output_layer.weight" and last:
            source = "model.embed_tokens.weight" if tied else "lm_head.weight"
            return self._vocabulary(self._prefix + source, at["tp"], shape, not tied)
        if name == "decoder.final_layernorm.weight" and (at["pp"], chunk) == self.final:
            source = self._need(f"{self._prefix}model.norm.weight")
            return ExpectedShard(lambda: self.tensors[source], (source,))
        raise Unknown("module", f"Megatron has no tensor {name} at pipeline rank {at['pp']}, chunk {chunk}")

    def hf_numbers(self, name: str) -> tuple[int | None, int | None]:
        """(layer, expert) of a Hugging Face tensor; multi-token prediction layers follow the decoder's."""
        return hf_numbers(mtp_names.standard(self.cell.family, self.cell.layers, name))

    def _named(self, layer: int, rest: str) -> str:
        """The Hugging Face name of a tensor of a layer."""
        decoder = self.cell.layers
        if layer < decoder:
            return f"{self._prefix}model.layers.{layer}.{rest}"
        return mtp_names.in_files(self.cell.family, decoder, layer - decoder, rest)

    def _need(self, name: str) -> str:
        if name not in self.tensors:
            raise Unknown("module", f"the checkpoint has no {name}")
        return name

    def _vocabulary(self, source: str, tp: int, shape: Sequence[int], read: bool) -> ExpectedShard:
        """Rows tp·n … tp·n+n−1 of the vocabulary, n being the target's choice; rows past its end are padding."""
        full, n = self.tensors[self._need(source)], int(shape[0])
        rows = range(min(tp * n, len(full)), min(tp * n + n, len(full)))

        def make() -> torch.Tensor:
            return torch.cat([full[list(rows)], full.new_zeros(n - len(rows), *full.shape[1:])])

        alias = "embed_tokens.weight" if "embed" in source else "shared_head.head.weight"
        copies = range(0 if self.cell.family in mtp_names.APART else self.cell.mtp)
        names = (source, *(self._need(self._named(self.cell.layers + k, alias)) for k in copies))
        return ExpectedShard(make, names if read else (), rows=len(rows), read=read)


def _tables(config: Mapping[str, Any], names: Collection[str]) -> tuple[Table, Table]:
    """The tables of a layer and of an expert; names of the checkpoint tell what it is of."""
    layer = {**shares.LAYER, **(shares.LATENT if config.get("kv_lora_rank") else shares.ATTENTION)}
    if any(".self_attn.indexer." in name for name in names):
        layer |= shares.INDEXER
    if any(".linear_attn." in name for name in names):
        layer |= hybrid.LAYER
    if any(name.endswith(".linear_attn.in_proj_qkv.weight") for name in names):
        layer |= hybrid.SEPARATE
    if any(name.endswith(".self_attn.sinks") for name in names):
        return {**layer, **gpt_oss.LAYER}, gpt_oss.EXPERT
    if any(name.endswith(".mlp.e_score_correction_bias") for name in names):
        layer |= shares.OUTER_BIAS
    if any(".block_sparse_moe." in name for name in names):
        return {**layer, **shares.MIXTRAL}, shares.MIXTRAL_EXPERT
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    return layer, shares.FUSED_EXPERT if fused else shares.EXPERT


def plain_local(local: str) -> str:
    """A local name without the `module.` of wrappers around the chunk."""
    while local.startswith("module."):
        local = local.removeprefix("module.")
    return local


@cache
def hf_numbers(name: str) -> tuple[int | None, int | None]:
    """(layer, expert) that a Hugging Face name spells."""
    layer, expert = _LAYER_HF.match(name), _EXPERT_HF.search(name)
    return int(layer[1]) if layer else None, int(expert[1]) if expert else None
