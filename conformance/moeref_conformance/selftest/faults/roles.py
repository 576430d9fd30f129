"""Exporter bugs of roles: who takes part in the stream, who is given a full tensor, and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Pair, Rewritten


def _everywhere(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            dist.broadcast(full, src=0)
            del tensor
            yield meta, full
            del full

    return Rewritten(session, rewrite)


def _every_stage_sends(session: Session, cell: Cell, world: World) -> Any:
    """The first rank of every pipeline stage opens a sender of its own for what its stage holds."""
    first_layer = cell.layers // cell.layout.pp

    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            of_last = meta.name.startswith(f"model.layers.{first_layer}.")
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            if of_last:
                dist.broadcast(full, src=0)
            del tensor
            yield meta, full if of_last or world.rank == 0 else None
            del full

    return Rewritten(session, rewrite)


def _one_rank_ends_early(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            if not (world.rank == 1 and meta.name == "lm_head.weight"):
                yield meta, tensor
            del tensor

    return Rewritten(session, rewrite)


def _aliases(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good = stream.export

    def export(plan: Any, rank: int, chunks: Any, group: Any = None) -> Iterator[Any]:
        live = {p.param.hf[0].name: t for p, t in stream.bind(plan.shard_map, rank, chunks) if len(p.param.hf) == 1}
        for tensor, full in good(plan, rank, chunks, group):
            same = live.get(tensor.name)
            yield tensor, same if full is not None and same is not None and same.shape == full.shape else full
            del full

    return [Edit(stream, "export", export)]


def _writer_alone(session: Session, cell: Cell, world: World) -> Any:
    wrapped = Rewritten(session, lambda stream: stream)
    good = wrapped.stream

    def stream() -> Iterator[Pair]:
        return good() if world.rank == 0 else iter(())

    wrapped.stream = stream  # type: ignore[method-assign]
    return wrapped


def _sizes_differ(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        mine = torch.zeros(2 + world.rank)
        dist.all_reduce(mine)
        yield from stream

    return Rewritten(session, rewrite)


FAULTS = (
    Fault(
        id="materialised-everywhere",
        bug="miles#755: every rank holds the full tensor",
        rules=("EXP-005",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_everywhere,
    ),
    Fault(
        id="every-stage-sends",
        bug="W13: vime#329, every pipeline stage opens a sender",
        rules=("EXP-005",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_every_stage_sends,
        says="are materialised here too",
    ),
    Fault(
        id="one-rank-ends-early",
        bug="W4 in kind: the writer sends all names, another rank's stream is one shorter",
        rules=("EXP-004",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_one_rank_ends_early,
        says="lm_head.weight",
    ),
    Fault(
        id="live-parameters-handed-out",
        bug="megatron-bridge and mbridge alias 123 of 135 tensors at TP=1",
        rules=("EXP-008",),
        also=("EXP-005",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_aliases,
        diagnosis="aliases a live parameter",
    ),
    Fault(
        id="writer-exports-alone",
        bug="ISEEKYAN/Megatron-LM#82: export on rank 0 only deadlocks",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_writer_alone,
        says="waits in all_gather, at stream.py:",
        deadline=6.0,
    ),
    Fault(
        id="ranks-disagree-on-sizes",
        bug="W11: slime#2134, ranks diverge in what they reduce",
        rules=("RUN-002",),
        also=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_sizes_differ,
        deadline=20.0,
    ),
)
