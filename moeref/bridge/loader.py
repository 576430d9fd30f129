"""Putting a checkpoint into real model chunks: this rank's shards, and only the slices they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moeref.bridge.blocks import BridgeError, bounding, relative
from moeref.bridge.checkpoint import Checkpoint, check_headers
from moeref.bridge.units import HFTensor, Placed, Table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inventory(chunks: Sequence[torch.nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """All parameters and persistent buffers of the chunks by (chunk, local name).

    Buffers count: the router's `expert_bias` is one, and leaving buffers out leaves it at zero (Megatron-Bridge#4657).
    """
    found: dict[tuple[int, str], torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        found.update({(number, name): p.data for name, p in chunk.named_parameters()})
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    found[number, name] = buffer
    return found


def bind(table: Table, rank: int, chunks: Sequence[torch.nn.Module]) -> list[tuple[Placed, torch.Tensor]]:
    """Match this rank's table with its real tensors, in canonical order.

    Raises BridgeError, naming family, tensor, rank and layout, if the chunks hold a tensor that the table does not
    know, lack one that it lists, or hold it in another shape or dtype.
    """
    held = inventory(chunks)
    where = f"{table.model.family}, rank {rank} ({table.layout.coords(rank).text}), layout {table.layout.text}"
    pairs: list[tuple[Placed, torch.Tensor]] = []
    for placed in table.placed(rank):
        tensor = held.pop((placed.chunk, placed.local), None)
        if tensor is None:
            raise BridgeError(f"{where}: chunk {placed.chunk} has no {placed.local} (global {placed.unit.name})")
        if tuple(tensor.shape) != placed.shape or tensor.dtype != DTYPES[placed.unit.dtype]:
            raise BridgeError(
                f"{where}: chunk {placed.chunk} {placed.local} is {list(tensor.shape)} {tensor.dtype}, "
                f"the table says {list(placed.shape)} {placed.unit.dtype}"
            )
        pairs.append((placed, tensor))
    if held:
        names = ", ".join(f"chunk {c} {n}" for c, n in list(held)[:3])
        raise BridgeError(f"{where}: {len(held)} tensors are in no row of the table: {names}; add a row to the family")
    return pairs


def hf_tensors(table: Table) -> list[HFTensor]:
    """Every Hugging Face tensor of the model once, in export order."""
    return list({t.name: t for u in table.units if u.exports for t in u.hf}.values())


def load(table: Table, rank: int, chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Fill the chunks of `rank` from a Hugging Face folder, in either spelling; padded vocabulary rows become zero.

    Names, shapes and dtypes of the whole checkpoint are checked against the headers before the first byte is written;
    then each Hugging Face tensor is read once, and only the slice whose elements this rank holds.
    Raises BridgeError as `bind` and `check_headers` do, and for an alias that differs from its tensor.
    """
    with Checkpoint(folder) as checkpoint:
        table = spelled_as(table, checkpoint.names)
        pairs = bind(table, rank, chunks)
        model = table.model
        check_headers(checkpoint, hf_tensors(table), model.family, table.layout.text, model.ignored)
        for placed, tensor in pairs:
            if placed.unit.row.how == "vocab":
                tensor.zero_()
            for source in sorted({b.source for b in placed.blocks}):
                base = bounding(placed.blocks, source)
                data = checkpoint.read(placed.unit.hf[source].name, base)
                for block in placed.blocks:
                    if block.source == source:
                        piece = data[relative(block.remote, base)]
                        _put(table, placed, source, tensor[block.local], piece.mT if block.turned else piece)


def _put(table: Table, placed: Placed, source: int, into: torch.Tensor, data: torch.Tensor) -> None:
    """Copy; an alias (a further source of a vocabulary row) has to equal what is there already."""
    if source and placed.unit.row.how == "vocab":
        if not torch.equal(into, data.to(into.device)):
            first, alias, held = placed.unit.hf[0].name, placed.unit.hf[source].name, placed.unit.name
            raise BridgeError(f"{table.model.family}: {alias} differs from {first}; Megatron holds one {held} for both")
    else:
        into.copy_(data)


def spelled_as(table: Table, names: set[str]) -> Table:
    """The table in the Hugging Face spelling that `names` use: per-expert files or transformers 5's fused tensors."""
    fused = any(n.endswith(".mlp.experts.gate_up_proj") for n in names)
    spelling = replace(table.spelling, hf="fused" if fused else "per_expert")
    return Table(table.model, table.layout, spelling, table.divisible_by)
