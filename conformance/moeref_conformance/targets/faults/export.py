"""Exporter bugs that send wrong bytes: gathering, splitting, padding, rounding, transposing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.api import TensorMeta
from moeref_conformance.targets.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.targets.faults.rewrite import Pair, each


def _gate_up_concatenated(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good = stream._fill

    def fill(plan: Any, unit: Any, fulls: Any, shards: Any) -> None:
        if shards is None or unit.row.how != "gate_up" or len(unit.hf) != 2:
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
        return unit.row.how == "row" and unit.expert is not None

    def fill(plan: Any, unit: Any, fulls: Any, shards: Any) -> None:
        if shards is not None and is_fc2(unit):
            fulls[0].copy_(torch.cat(list(shards), dim=0))
        else:
            good_fill(plan, unit, fulls, shards)

    def on_dim_0(step: Any, etp: int) -> Any:
        rows, columns = step.tensors[0].shape
        wrong = (replace(step.tensors[0], shape=(rows * etp, columns // etp)),)
        return replace(step, units=tuple(replace(u, hf=wrong) for u in step.units), tensors=wrong)

    def steps(plan: Any) -> Any:
        etp = plan.table.layout.etp
        return tuple(on_dim_0(s, etp) if is_fc2(s.units[0]) else s for s in good_steps(plan))

    return [Edit(stream, "_fill", fill), Edit(plan.Plan, "steps", property(steps))]


def _no_etp_gather(rooms: Rooms) -> Iterable[Edit]:
    table = rooms["units"].Table
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
        if unit.row.how == "row" and unit.name in held:
            strided = held[unit.name].t().contiguous()
            held = held | {unit.name: strided.view(-1).view(held[unit.name].shape)}
        return good(plan, rank, unit, held, *rest)

    return [Edit(stream, "_collect", collect)]


def _padding_exported(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if "embed_tokens" not in meta.name and "lm_head" not in meta.name:
        return meta, tensor
    more = 256 - tensor.shape[0]
    return replace(meta, shape=(256, tensor.shape[1])), torch.cat([tensor, tensor.new_zeros(more, tensor.shape[1])])


def _bias_in_bf16(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return (meta, tensor.bfloat16().float()) if meta.name.endswith("e_score_correction_bias") else (meta, tensor)


def _everything_in_bf16(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return replace(meta, dtype="bfloat16"), tensor.bfloat16()


def _fused_transposed(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if tensor.ndim != 3:
        return meta, tensor
    turned = tensor.transpose(1, 2).contiguous()
    return replace(meta, shape=tuple(turned.shape)), turned


def _gate_for_up(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    name = meta.name
    if ".experts." in name and "shared" not in name:
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for part, other in swap.items():
            if part in name:
                return replace(meta, name=name.replace(part, other)), tensor
    return meta, tensor


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
    ),
    Fault(
        id="experts-not-gathered-at-ep1",
        bug="B17: mbridge b51c310, EP=1 with ETP>1 skipped the expert merge",
        rules=("EXP-002",),
        also=(
            "EXP-006",
            "EXP-007",
        ),
        cell=cell("qwen3_moe", "tp2"),
        edits=_no_etp_gather,
    ),
    Fault(
        id="view-of-strided",
        bug="B42: NeMo-RL#2418, verl#6919, miles#1608: view(-1) of a strided tensor",
        rules=("EXP-002",),
        also=("EXP-006",),
        cell=cell("qwen3_moe", "pp2"),
        edits=_view_of_strided,
    ),
    Fault(
        id="padded-vocabulary-exported",
        bug="B32: Megatron-Bridge#5375",
        rules=("EXP-003",),
        also=(
            "EXP-004",
            "EXP-006",
        ),
        cell=cell("qwen3_moe", "tp2"),
        wrap=each(_padding_exported),
        diagnosis="padd",
    ),
    Fault(
        id="bias-rounded-to-bf16",
        bug="B41: miles#811, the router bias goes through bf16",
        rules=("EXP-002",),
        also=("EXP-006",),
        cell=cell("glm4_moe", "pp2"),
        wrap=each(_bias_in_bf16),
        diagnosis="bf16",
    ),
    Fault(
        id="everything-cast-to-bf16",
        bug="B41: sglang#37133, one dtype for all tensors",
        rules=("EXP-003",),
        also=(
            "EXP-004",
            "EXP-006",
        ),
        cell=cell("glm4_moe", "tp2"),
        wrap=each(_everything_in_bf16),
    ),
    Fault(
        id="fused-experts-transposed",
        bug="B43: Megatron-Bridge#3278, fused experts as [in, out]",
        rules=("EXP-003",),
        also=(
            "EXP-004",
            "EXP-006",
        ),
        cell=cell("qwen3_moe", "ep2", spelling="fused"),
        wrap=each(_fused_transposed),
        diagnosis="transpose",
    ),
    Fault(
        id="gate-and-up-swapped",
        bug="slime#1840 in kind: the halves of fc1 under each other's names",
        rules=("EXP-002",),
        also=(
            "EXP-004",
            "EXP-006",
        ),
        cell=cell("qwen3_moe", "ep2"),
        wrap=each(_gate_for_up),
        diagnosis="gate and up swapped",
    ),
)
