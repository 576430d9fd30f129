"""Exporter bugs of gathering: which shards come from whom, in which order, and how they are joined.

The good export is taken apart into shards again and put together wrongly. All cells with TP here have two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair, Tensors, each, whole_stream
from moeref_conformance.selftest.faults.base import Fault, cell

_SHARDED = re.compile(r"\.(?:[qkvo]|gate|up|down)_proj\.weight$")


def _shards(name: str, full: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """The dimension along which a projection is split, and its shards on two ranks."""
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    return dim, list(full.chunk(2, dim))


def _gate_up_concatenated(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith("gate_proj.weight"):
            up = name.replace("gate_proj", "up_proj")
            (gate_0, gate_1), (up_0, up_1) = tensors[name].chunk(2), tensors[up].chunk(2)
            tensors[name], tensors[up] = torch.cat([gate_0, up_0]), torch.cat([gate_1, up_1])


def _is_fc2(name: str) -> bool:
    return ".experts." in name and name.endswith("down_proj.weight")


def _fc2_on_dim_0(session: Any, cell: Cell, world: World) -> Any:
    """The exporter takes expert fc2 to be split on dim 0; loading is right."""
    etp = cell.layout.expert_tp

    def meta_on_dim_0(meta: TensorMeta) -> TensorMeta:
        rows, columns = (*meta.shape, 0)[:2]
        return replace(meta, shape=(rows * etp, columns // etp)) if _is_fc2(meta.name) else meta

    def on_dim_0(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
        return meta, torch.cat(tensor.chunk(etp, 1)) if _is_fc2(meta.name) else tensor

    return border.described(meta_on_dim_0)(each(on_dim_0)(session, cell, world), cell, world)


def _replicas_joined(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """The norms of q and k, which all TP ranks hold, are joined as shards are."""
    if not meta.name.endswith(("q_norm.weight", "k_norm.weight")):
        return meta, tensor
    return replace(meta, shape=(2 * len(tensor),)), torch.cat([tensor, tensor])


def _own_shard(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """Of an expert's tensor the writer sends its own shard, as it is."""
    if ".experts." not in meta.name:
        return meta, tensor
    shard = _shards(meta.name, tensor)[1][0].contiguous()
    return replace(meta, shape=tuple(shard.shape)), shard


def _no_etp_gather(tensors: Tensors) -> None:
    """Only the first rank's shard of an expert arrives."""
    for name, tensor in tensors.items():
        if ".experts." in name:
            _shards(name, tensor)[1][1].zero_()


def _view_of_strided(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """The bytes of a row-parallel shard are read in storage order although the tensor is a transposed view."""
    if meta.name.endswith(("o_proj.weight", "down_proj.weight")):
        tensor = tensor.t().contiguous().view(tensor.shape)
    return meta, tensor


def _etp_reversed(tensors: Tensors) -> None:
    for name in tensors:
        if ".experts." in name:
            dim, shards = _shards(name, tensors[name])
            tensors[name] = torch.cat(shards[::-1], dim)


def _ep_mirrored(tensors: Tensors) -> None:
    """The experts of EP rank 0 arrive under the names of those of rank 1 and vice versa."""
    good = dict(tensors)
    for name in good:
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert:
            tensors[name] = good[name.replace(expert[0], f"experts.{(int(expert[1]) + 8) % 16}.")]


def _aliased_list(tensors: Tensors) -> None:
    """The list of receive buffers is `[buffer] * n`: every shard is the last one received."""
    for name in tensors:
        if _SHARDED.search(name):
            dim, shards = _shards(name, tensors[name])
            tensors[name] = torch.cat([shards[-1]] * 2, dim)


def _qkv_stacked(tensors: Tensors) -> None:
    """The exporter reads the fused tensor as all of q, then all of k, then all of v; loading is right."""
    for q in [name for name in tensors if name.endswith("q_proj.weight")]:
        names = [q.replace("q_proj", name) for name in ("q_proj", "k_proj", "v_proj")]
        groups = [tensors[name].reshape(8, -1, tensors[name].shape[1]) for name in names]
        stacked = torch.split(torch.cat(groups, dim=1).flatten(0, 1), [len(tensors[name]) for name in names])
        tensors.update({name: rows.clone() for name, rows in zip(names, stacked, strict=True)})


def _fused_not_rechunked(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """Experts are sent in the order of the ranks, [gate 0; up 0; gate 1; up 1], not [gate 0; gate 1; up 0; up 1]."""
    if meta.name.endswith("experts.gate_up_proj"):
        tensor = tensor.view(len(tensor), 2, 2, -1, tensor.shape[2]).transpose(1, 2).reshape(tensor.shape)
    return meta, tensor


class _Wrapped:
    """A process group in a wrapper that torch has not registered."""


def _group_wrapped(session: Any, cell: Cell, world: World) -> Any:
    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        group: Any = _Wrapped()
        dist.all_gather_object([None] * world.size, cell.id, group=group)
        yield from pairs

    return border.stream(session, rewrite)


def _type_of_no_module(session: Any, cell: Cell, world: World) -> Any:
    """At PP=1 every rank looks up the dtype of each expert's tensor, also ranks without that expert."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        own: Any = {name: tensor for row, tensor in border.held(session, world) for name in row.hf}
        for meta, tensor in pairs:
            if ".experts." in meta.name and cell.layout.pp == 1:
                _ = own.get(meta.name).dtype
            yield meta, tensor
            del tensor

    return border.stream(session, rewrite)


FAULTS = (
    Fault(
        id="gate-up-not-rechunked",
        bug="B29: Megatron-Bridge#1817, TP shards of fc1 concatenated, then halved",
        rules=("EXP-002",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=whole_stream(_gate_up_concatenated),
        diagnosis="re-chunk",
    ),
    Fault(
        id="fc2-gathered-on-dim-0",
        bug="B30: slime and AReaL, expert fc2 claims partition dim 0",
        rules=("EXP-003",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_fc2_on_dim_0,
        diagnosis="shards of dim 1 concatenated on dim 0",
    ),
    Fault(
        id="experts-not-gathered-at-ep1",
        bug="B17: mbridge b51c310, Megatron-Bridge#1857: EP=1 with ETP>1 skipped the expert merge",
        rules=("EXP-002",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=whole_stream(_no_etp_gather),
        diagnosis="columns 28–55 are zero: shard 1 of 2 is missing",
    ),
    Fault(
        id="replicas-joined",
        bug="Megatron-Bridge#3458 in kind: what ranks hold alike is joined as if each had a part of it",
        rules=("EXP-003", "EXP-007"),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=each(_replicas_joined),
    ),
    Fault(
        id="expert-shards-sent",
        bug="slime#2280: what is gathered goes by an attribute that grouped experts' parameters do not have",
        rules=("EXP-003", "EXP-007"),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=each(_own_shard),
    ),
    Fault(
        id="view-of-strided",
        bug="B42: NeMo-RL#2418, verl#6919, miles#1608, prime-rl#3113: a strided tensor is read as one run of memory",
        rules=("EXP-002",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_view_of_strided),
        diagnosis="in the storage order of its transpose",
        one_rank=True,
    ),
    Fault(
        id="etp-shards-reversed",
        bug="the rank order of the ETP gather reversed",
        rules=("EXP-002",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=whole_stream(_etp_reversed),
        diagnosis="TP or ETP shards of dim 1 in the order 1, 0",
    ),
    Fault(
        id="ep-ranks-mirrored",
        bug="the order of the EP group is not that of the ranks: experts arrive under each other's names",
        rules=("EXP-002",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=whole_stream(_ep_mirrored),
        diagnosis="holds expert 8",
    ),
    Fault(
        id="gather-list-aliased",
        bug="receive buffers made by list multiplication are one buffer",
        rules=("EXP-002",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=whole_stream(_aliased_list),
        diagnosis="TP or ETP shards of dim 1 are 1, 1",
    ),
    Fault(
        id="qkv-exported-as-q-k-v",
        bug="B31: NeMo-RL#2802, the exporter drops the interleave of KV groups",
        rules=("EXP-002",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=whole_stream(_qkv_stacked),
        diagnosis="the interleave of 8 KV groups is lost",
        one_rank=True,
    ),
    Fault(
        id="fused-gate-up-not-rechunked",
        bug="B29: Megatron-Bridge#1817 with transformers 5's fused experts",
        rules=("EXP-002",),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2", expert_format="fused"),
        wrap=each(_fused_not_rechunked),
        diagnosis="re-chunk",
    ),
    Fault(
        id="group-not-registered",
        bug="B26: miles ce7547c, a wrapped process group is not registered, and PP>1 fails",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_group_wrapped,
        says="_Wrapped object",
    ),
    Fault(
        id="type-of-no-module",
        bug="B37: Megatron-Bridge#3414, Megatron-Bridge#4592: EP>1 at PP=1 meets a module that is None",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_type_of_no_module,
        says="'NoneType' object has no attribute 'dtype'",
    ),
)
