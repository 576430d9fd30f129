"""Streaming full Hugging Face tensors out of a sharded model, one at a time, to one writer rank.

Owners send their shards point to point to the writer, in the order of the plan; no other rank ever holds a full tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from moeref.bridge.agreement import all_or_none, check_place, device_of
from moeref.bridge.loader import bind
from moeref.bridge.shard_map import GlobalParam, HFTensor
from moeref.exporter.plan import ExportError, Plan
from moeref.torch_dtypes import TORCH


def export(
    plan: Plan, rank: int, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[HFTensor, torch.Tensor | None]]:
    """Yield (tensor's description, full tensor on the writer or None elsewhere) for every tensor of the plan, in order.

    `group` holds the layout's ranks in order (default: the world); all of them must iterate to the end. A yielded
    tensor shares no memory with the model or with a later one. It is on the device of the parameters, except where they
    are offloaded to the host and the group is NCCL's, which cannot send from there: then on the current CUDA device.
    Padded vocabulary rows are left out; a tied head appears once, as the embedding.
    Before anything is sent, raises BridgeError if the chunks hold a tensor that the shard map does not list or if the
    group is not the layout's; ExportError on the other ranks, and on all of them if their plans differ.
    """
    device = device_of(chunks, group)
    where = f"{plan.shard_map.model.family}, rank {rank}"
    with all_or_none(plan.digest, device, group, lambda reason: ExportError(f"{where}: {reason}; nothing was sent")):
        check_place(plan.shard_map.layout, rank, group)
        held = {shard.param.name: tensor for shard, tensor in bind(plan.shard_map, rank, chunks) if shard.param.exports}
    for step in plan.steps:
        if len(step.tensors) == 1:
            tensor = step.tensors[0]
            full = _empty(tensor, device) if rank == plan.writer else None
            for param in step.params:
                _fill(plan, param, {0: full}, _collect(plan, rank, param, held, device, group))
            yield tensor, full
        else:
            shards = _collect(plan, rank, step.params[0], held, device, group)
            for number, tensor in enumerate(step.tensors):
                full = _empty(tensor, device) if rank == plan.writer else None
                _fill(plan, step.params[0], {number: full}, shards)
                yield tensor, full
                del full
        full = None


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    """The global rank of the layout's `rank`; they differ where engines share the world with the trainers."""
    return rank if group is None else dist.get_global_rank(group, rank)


def _empty(tensor: HFTensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=TORCH[tensor.dtype], device=device)


def _collect(
    plan: Plan,
    rank: int,
    param: GlobalParam,
    held: dict[str, torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor] | None:
    """The shards of `param` in TP (ETP) order on the writer, None elsewhere. The writer's own shard is not copied."""
    owners = plan.shard_map.owners(param)
    if rank != plan.writer:
        if rank in owners:
            # gloo and NCCL send contiguous tensors only.
            dist.send(held[param.name].to(device).contiguous(), dst=_global(plan.writer, group), group=group)
        return None
    shards: list[torch.Tensor] = []
    for part, owner in enumerate(owners):
        if owner == rank:
            shards.append(held[param.name])
            continue
        shape, _ = plan.shard_map.shard(param, part)
        shard = torch.empty(shape, dtype=TORCH[param.dtype], device=device)
        dist.recv(shard, src=_global(owner, group), group=group)
        shards.append(shard)
    return shards


def _fill(
    plan: Plan, param: GlobalParam, fulls: dict[int, torch.Tensor | None], shards: list[torch.Tensor] | None
) -> None:
    """Copy every region of `shards` into `fulls`, the full tensors by their number in the parameter."""
    if shards is None:
        return
    for part, shard in enumerate(shards):
        _, regions = plan.shard_map.shard(param, part)
        for region in regions:
            full = fulls.get(region.tensor)
            if full is not None:
                place = full[region.hf_index]
                (place.mT if region.transposed else place).copy_(shard[region.shard_index])
