"""Loading a checkpoint into real model chunks: a rank reads only the slices that its shards hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from moeref.bridge.agreement import all_or_none, check_place, device_of
from moeref.bridge.checkpoint import Checkpoint, check_headers
from moeref.bridge.regions import BridgeError, bounding, relative
from moeref.bridge.shard_map import LocalShard, ShardMap
from moeref.torch_dtypes import TORCH


def inventory(chunks: Sequence[torch.nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """All parameters and persistent buffers of the chunks by (chunk, local name).

    The router's `expert_bias` is a buffer; a loader that skips buffers leaves it at zero (Megatron-Bridge#4657).
    """
    found = ((n, name, tensor) for n, chunk in enumerate(chunks) for name, tensor in _held(chunk).items())
    return {(number, name): tensor.data for number, name, tensor in found}


def _held(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each under its first name, and persistent buffers.

    Torch's `named_parameters` gives the same; its nested generators take longer than an export of small tensors.
    """
    held: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    todo: list[tuple[str, torch.nn.Module]] = [("", chunk)]
    while todo:
        prefix, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                held[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[prefix + name] = buffer
        if module._modules:
            children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
            todo += reversed(children)
    return held | buffers


def bind(shard_map: ShardMap, rank: int, chunks: Sequence[torch.nn.Module]) -> list[tuple[LocalShard, torch.Tensor]]:
    """The shards of `rank`, each with its real tensor, in canonical order.

    Raises BridgeError, naming family, tensor, rank and layout, if the chunks hold a tensor that the map does not list,
    lack one that it lists, or hold it in another shape or dtype.
    """
    return [(shard, tensor.data) for shard, tensor in bound(shard_map, rank, chunks)]


def bound(shard_map: ShardMap, rank: int, chunks: Sequence[torch.nn.Module]) -> list[tuple[LocalShard, torch.Tensor]]:
    """As `bind`, with the parameters themselves, which autograd follows."""
    held, layout = [_held(chunk) for chunk in chunks], shard_map.layout
    where = f"{shard_map.model.family}, rank {rank} ({layout.coords(rank).text}), layout {layout.text}"
    pairs: list[tuple[LocalShard, torch.Tensor]] = []
    for shard in shard_map.local_shards(rank):
        param, chunk, local_name, shape, _ = shard
        tensor = held[chunk].pop(local_name, None) if chunk < len(held) else None
        if tensor is None:
            raise BridgeError(f"{where}: chunk {chunk} has no {local_name} (global {param.name})")
        if tensor.shape != shape or tensor.dtype != TORCH[param.dtype]:
            raise BridgeError(
                f"{where}: chunk {chunk} {local_name} is {list(tensor.shape)} {tensor.dtype}, "
                f"the table says {list(shape)} {param.dtype}"
            )
        pairs.append((shard, tensor))
    left = [f"chunk {number} {name}" for number, names in enumerate(held) for name in names]
    if left:
        raise BridgeError(
            f"{where}: {len(left)} tensors are in no row of the table: {', '.join(left[:3])}; add a row to the family"
        )
    return pairs


def load(
    shard_map: ShardMap,
    rank: int,
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the chunks of `rank` from a Hugging Face folder, in either expert format; vocabulary padding becomes zero.

    Weights in FP8, INT4 or MXFP4, as `model.fp8_block`, `model.int4_group` and `model.mxfp4` say, become bf16. What the
    model keeps in fp32 may be bf16 in files, and is widened with a warning.

    Names, shapes and dtypes of the whole checkpoint are checked against the headers before the first byte is written;
    then each Hugging Face tensor is read once, and only the slice whose elements this rank holds.

    With `torch.distributed` all ranks of `group` call this (default: the world), and all raise if one does. Without it
    a process may load any rank.

    Raises BridgeError as `bind` and `check_headers` do, for an alias that differs from its tensor, for a group with
    other ranks than the layout, and if another rank of the group refused or loads another model, before it is written
    where possible.
    """
    where = f"{shard_map.model.family}, rank {rank}"

    def together(consequence: str) -> AbstractContextManager[None]:
        digest, device = shard_map.digest, device_of(chunks, group)
        return all_or_none(digest, device, group, lambda reason: BridgeError(f"{where}: {reason}; {consequence}"))

    with ExitStack() as opened:
        with together("nothing was written"):
            if dist.is_initialized() and dist.get_world_size(group) != 1:
                check_place(shard_map.layout, rank, group)
            checkpoint = opened.enter_context(Checkpoint.of_model(folder, shard_map.model))
            in_format = shard_map.for_checkpoint(checkpoint.names)
            pairs = bind(in_format, rank, chunks)
            check_headers(checkpoint, in_format)
        with together("the model is loaded in part"):
            for shard, tensor in pairs:
                _fill(in_format, checkpoint, shard, tensor)


def read_shard(shard_map: ShardMap, checkpoint: Checkpoint, shard: LocalShard) -> torch.Tensor:
    """One shard of a checkpoint, without a module; headers have been checked, and `shard_map` has its format."""
    tensor = torch.empty(shard.shape, dtype=TORCH[shard.param.dtype])
    _fill(shard_map, checkpoint, shard, tensor)
    return tensor


def _fill(shard_map: ShardMap, checkpoint: Checkpoint, shard: LocalShard, tensor: torch.Tensor) -> None:
    """Read the regions of one shard."""
    if shard.param.mapping.sharding == "vocab":
        tensor.zero_()
    for number in sorted({region.tensor for region in shard.regions}):
        base = bounding(shard.regions, number)
        data = checkpoint.read(shard.param.hf[number].name, base)
        for region in shard.regions:
            if region.tensor == number:
                piece = data[relative(region.hf_index, base)]
                into = tensor[region.shard_index]
                _put(shard_map, shard, number, into, piece.mT if region.transposed else piece)


def _put(shard_map: ShardMap, shard: LocalShard, number: int, into: torch.Tensor, data: torch.Tensor) -> None:
    """Copy `data`. An alias (a further tensor of the vocabulary) is only compared with what was copied before."""
    param = shard.param
    if number and param.mapping.sharding == "vocab":
        if not torch.equal(into, data.to(into.device)):
            raise BridgeError(
                f"{shard_map.model.family}: {param.hf[number].name} differs from {param.hf[0].name}; "
                f"Megatron holds one {param.name} for both"
            )
    else:
        into.copy_(data)
