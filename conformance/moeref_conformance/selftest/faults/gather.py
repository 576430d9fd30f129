"""Exporter bugs of gathering: which shards come from whom, in which order, and how they are joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell


def _gate_up_concatenated(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good = stream._fill

    def fill(plan: Any, unit: Any, fulls: Any, shards: Any) -> None:
        if shards is None or unit.mapping.sharding != "gate_up" or len(unit.hf) != 2:
            good(plan, unit, fulls, shards)
            return
        halves = torch.cat(list(shards)).chunk(2)
        for source, full in fulls.items():
            full.copy_(halves[source])

    return [Edit(stream, "_fill", fill)]


def _fc2_on_dim_0(rooms: Rooms) -> Iterable[Edit]:
    """The exporter alone believes that expert fc2 is split on dim 0; loading is right."""
    stream, plan = rooms["stream"], rooms["plan"]
    good_fill, good_steps = stream._fill, plan.Plan.steps.func

    def is_fc2(unit: Any) -> bool:
        return unit.mapping.sharding == "row" and unit.expert is not None

    def fill(plan: Any, unit: Any, fulls: Any, shards: Any) -> None:
        if shards is not None and is_fc2(unit):
            fulls[0].copy_(torch.cat(list(shards), dim=0))
        else:
            good_fill(plan, unit, fulls, shards)

    def on_dim_0(step: Any, etp: int) -> Any:
        rows, columns = step.tensors[0].shape
        wrong = (replace(step.tensors[0], shape=(rows * etp, columns // etp)),)
        return replace(step, params=tuple(replace(u, hf=wrong) for u in step.params), tensors=wrong)

    def steps(plan: Any) -> Any:
        etp = plan.shard_map.layout.etp
        return tuple(on_dim_0(s, etp) if is_fc2(s.params[0]) else s for s in good_steps(plan))

    return [Edit(stream, "_fill", fill), Edit(plan.Plan, "steps", property(steps))]


def _no_etp_gather(rooms: Rooms) -> Iterable[Edit]:
    table = rooms["shard_map"].ShardMap
    good = table.owners

    def owners(self: Any, unit: Any) -> Any:
        found = good(self, unit)
        return found[:1] if unit.expert is not None and self.layout.ep == 1 else found

    def zeros(tensor: Any, device: Any) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)

    return [Edit(table, "owners", owners), Edit(rooms["stream"], "_empty", zeros)]


def _view_of_strided(rooms: Rooms) -> Iterable[Edit]:
    """The bytes of a row-parallel shard are read in storage order although the tensor is a transposed view."""
    stream = rooms["stream"]
    good = stream._collect

    def collect(plan: Any, rank: int, unit: Any, held: Any, *rest: Any) -> Any:
        if unit.mapping.sharding == "row" and unit.name in held:
            strided = held[unit.name].t().contiguous()
            held = held | {unit.name: strided.view(-1).view(held[unit.name].shape)}
        return good(plan, rank, unit, held, *rest)

    return [Edit(stream, "_collect", collect)]


def _etp_reversed(rooms: Rooms) -> Iterable[Edit]:
    table = rooms["shard_map"].ShardMap
    good = table.owners

    def owners(self: Any, unit: Any) -> Any:
        return good(self, unit)[:: -1 if unit.expert is not None else 1]

    return [Edit(table, "owners", owners)]


def _ep_mirrored(rooms: Rooms) -> Iterable[Edit]:
    """The experts of EP rank r arrive under the names of those of rank EP − 1 − r."""
    stream = rooms["stream"]
    good = stream._collect

    def collect(plan: Any, rank: int, unit: Any, *rest: Any) -> Any:
        table = plan.shard_map
        if unit.expert is not None:
            each = table.model.experts // table.layout.ep
            ep, local = divmod(unit.expert, each)
            other = (table.layout.ep - 1 - ep) * each + local
            unit = next(
                u for u in table.global_params if (u.layer, u.expert, u.mapping) == (unit.layer, other, unit.mapping)
            )
        return good(plan, rank, unit, *rest)

    return [Edit(stream, "_collect", collect)]


def _aliased_list(rooms: Rooms) -> Iterable[Edit]:
    """The list of receive buffers is `[buffer] * n`: every shard is the last one received."""
    stream = rooms["stream"]
    good = stream._collect

    def collect(*args: Any) -> Any:
        shards = good(*args)
        return shards and [shards[-1]] * len(shards)

    return [Edit(stream, "_collect", collect)]


def _qkv_stacked(rooms: Rooms) -> Iterable[Edit]:
    """The exporter alone reads the fused tensor as all of q, then all of k, then all of v."""
    stream = rooms["stream"]
    good = stream._fill

    def fill(plan: Any, unit: Any, fulls: Any, shards: Any) -> None:
        if shards is None or unit.mapping.sharding != "qkv":
            good(plan, unit, fulls, shards)
            return
        pieces = torch.split(torch.cat(list(shards)), [t.shape[0] for t in unit.hf])
        for source, full in fulls.items():
            full.copy_(pieces[source])

    return [Edit(stream, "_fill", fill)]


def _fused_not_rechunked(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good = stream._fill

    def fill(plan: Any, unit: Any, fulls: Any, shards: Any) -> None:
        if shards is None or unit.mapping.sharding != "gate_up" or unit.expert is None:
            good(plan, unit, fulls, shards)
        else:
            fulls[0][unit.expert].copy_(torch.cat(list(shards)))

    return [Edit(stream, "_fill", fill)]


class _Wrapped:
    """A process group in a wrapper that torch has not registered."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _group_wrapped(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good = stream.export

    def export(plan: Any, rank: int, chunks: Any, group: Any = None) -> Iterator[Any]:
        return iter(good(plan, rank, chunks, _Wrapped(torch.distributed.group.WORLD)))

    return [Edit(stream, "export", export)]


def _type_of_no_module(rooms: Rooms) -> Iterable[Edit]:
    """What an expert's tensor is like is broadcast over PP alone; other EP ranks have no module to look at."""
    stream = rooms["stream"]
    good = stream._collect

    def collect(plan: Any, rank: int, unit: Any, held: Any, *rest: Any) -> Any:
        if plan.shard_map.layout.pp == 1 and unit.expert is not None:
            _ = held.get(unit.name).dtype
        return good(plan, rank, unit, held, *rest)

    return [Edit(stream, "_collect", collect)]


FAULTS = (
    Fault(
        id="gate-up-not-rechunked",
        bug="B29: Megatron-Bridge#1817, TP shards of fc1 concatenated, then halved",
        rules=("EXP-002",),
        also=(
            "EXP-006",
            "EXP-007",
        ),
        cell=cell("qwen3_moe", "tp2"),
        edits=_gate_up_concatenated,
        diagnosis="re-chunk",
    ),
    Fault(
        id="fc2-gathered-on-dim-0",
        bug="B30: slime and AReaL, expert fc2 claims partition dim 0",
        rules=("EXP-003",),
        also=(
            "EXP-006",
            "EXP-007",
        ),
        cell=cell("qwen3_moe", "tp2"),
        edits=_fc2_on_dim_0,
        diagnosis="shards of dim 1 concatenated on dim 0",
    ),
    Fault(
        id="experts-not-gathered-at-ep1",
        bug="B17: mbridge b51c310, Megatron-Bridge#1857: EP=1 with ETP>1 skipped the expert merge",
        rules=("EXP-002",),
        also=(
            "EXP-006",
            "EXP-007",
        ),
        cell=cell("qwen3_moe", "tp2"),
        edits=_no_etp_gather,
        diagnosis="columns 28–55 are zero: shard 1 of 2 is missing",
    ),
    Fault(
        id="view-of-strided",
        bug="B42: NeMo-RL#2418, verl#6919, miles#1608: view(-1) of a strided tensor",
        rules=("EXP-002",),
        also=("EXP-006",),
        cell=cell("qwen3_moe", "pp2"),
        edits=_view_of_strided,
        diagnosis="in the storage order of its transpose",
        one_rank=True,
    ),
    Fault(
        id="etp-shards-reversed",
        bug="the rank order of the ETP gather reversed",
        rules=("EXP-002",),
        also=("EXP-006", "EXP-007"),
        cell=cell("qwen3_moe", "tp2"),
        edits=_etp_reversed,
        diagnosis="TP or ETP shards of dim 1 in the order 1, 0",
    ),
    Fault(
        id="ep-ranks-mirrored",
        bug="the order of the EP group is not that of the ranks: experts arrive under each other's names",
        rules=("EXP-002",),
        also=("EXP-006", "EXP-007"),
        cell=cell("qwen3_moe", "ep2"),
        edits=_ep_mirrored,
        diagnosis="is expert 8",
    ),
    Fault(
        id="gather-list-aliased",
        bug="receive buffers made by list multiplication are one buffer",
        rules=("EXP-002",),
        also=("EXP-006", "EXP-007"),
        cell=cell("qwen3_moe", "tp2"),
        edits=_aliased_list,
        diagnosis="TP or ETP shards of dim 0 are 1, 1",
    ),
    Fault(
        id="qkv-exported-as-q-k-v",
        bug="B31: NeMo-RL#2802, the exporter drops the interleave of KV groups",
        rules=("EXP-002",),
        also=("EXP-006",),
        cell=cell("qwen3_moe", "tp2"),
        edits=_qkv_stacked,
        diagnosis="the interleave of 8 KV groups is lost",
        one_rank=True,
    ),
    Fault(
        id="fused-gate-up-not-rechunked",
        bug="B29: Megatron-Bridge#1817 with transformers 5's fused experts",
        rules=("EXP-002",),
        also=("EXP-006", "EXP-007"),
        cell=cell("qwen3_moe", "tp2", expert_format="fused"),
        edits=_fused_not_rechunked,
        diagnosis="re-chunk",
    ),
    Fault(
        id="group-not-registered",
        bug="B26: miles ce7547c, a wrapped process group is not registered, and PP>1 fails",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        edits=_group_wrapped,
        says="_Wrapped object",
    ),
    Fault(
        id="type-of-no-module",
        bug="B37: Megatron-Bridge#3414, Megatron-Bridge#4592: EP>1 at PP=1 meets a module that is None",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_type_of_no_module,
        says="'NoneType' object has no attribute 'dtype'",
    ),
)
