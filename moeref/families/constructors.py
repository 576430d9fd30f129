"""Short ways to write a `ParamMapping` in a family's table, one for each kind of layer.

`dims` name the dimensions of the Hugging Face tensor. Everything that a constructor does not take keeps its default.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

from moeref.families.mapping import HFPattern, ParamMapping, Where


class Options(TypedDict, total=False):
    """Fields of a `ParamMapping` that every constructor passes on."""

    te_name: str
    where: Where
    only_if: str
    dtype: str


def replicated(
    *, megatron: str, hf: str, dims: tuple[str, ...], fused: str = "", **options: Unpack[Options]
) -> ParamMapping:
    """Whole on every rank: a norm, a router, a bias behind a row-parallel linear. fused: the name in memory."""
    in_memory = HFPattern(fused, dims) if fused else None
    return ParamMapping(megatron=megatron, hf=(HFPattern(hf, dims),), fused=in_memory, **options)


def column(*, megatron: str, hf: str, dims: tuple[str, ...], **options: Unpack[Options]) -> ParamMapping:
    """A column-parallel linear, or a vector with an element per head: dim 0 is split."""
    return ParamMapping(megatron=megatron, hf=(HFPattern(hf, dims),), sharding="column", **options)


def row(*, megatron: str, hf: str, dims: tuple[str, str], fused: str = "", **options: Unpack[Options]) -> ParamMapping:
    """A row-parallel linear: dim 1 is split. fused: the tensor in memory that holds all experts."""
    in_memory = HFPattern(fused, ("experts", *dims)) if fused else None
    return ParamMapping(megatron=megatron, hf=(HFPattern(hf, dims),), sharding="row", fused=in_memory, **options)


def vocab(*, megatron: str, hf: str, mtp_copy: str = "", **options: Unpack[Options]) -> ParamMapping:
    """Word embedding or output layer, padded and split over TP. mtp_copy: its name in an MTP layer of the files."""
    dims = ("vocab", "hidden")
    alias = HFPattern(mtp_copy, dims) if mtp_copy else None
    return ParamMapping(megatron=megatron, hf=(HFPattern(hf, dims),), sharding="vocab", alias=alias, **options)


def qkv(*, megatron: str, q: str, k: str, v: str, **options: Unpack[Options]) -> ParamMapping:
    """Megatron's `linear_qkv`, weight or bias."""
    dims = () if megatron.endswith(".bias") else ("hidden",)
    hf = HFPattern(q, ("q", *dims)), HFPattern(k, ("kv", *dims)), HFPattern(v, ("kv", *dims))
    return ParamMapping(megatron=megatron, hf=hf, sharding="qkv", **options)


def gated_qkv(*, megatron: str, q: str, k: str, v: str, **options: Unpack[Options]) -> ParamMapping:
    """Megatron's `linear_qkv.weight` where `q` holds [query | gate] for every head."""
    hf = HFPattern(q, ("2q", "hidden")), HFPattern(k, ("kv", "hidden")), HFPattern(v, ("kv", "hidden"))
    return ParamMapping(megatron=megatron, hf=hf, sharding="gated_qkv", **options)


def gated_mlp(
    *, megatron: str, gate: str, up: str, width: str, fused: str = "", **options: Unpack[Options]
) -> ParamMapping:
    """`linear_fc1` of a gated MLP of `width` rows each. fused: the tensor in memory that holds all experts."""
    hf = HFPattern(gate, (width, "hidden")), HFPattern(up, (width, "hidden"))
    in_memory = HFPattern(fused, ("experts", f"2{width}", "hidden")) if fused else None
    return ParamMapping(megatron=megatron, hf=hf, sharding="gate_up", fused=in_memory, **options)
