"""Exporter bugs of roles: who takes part in the stream, who is given a full tensor, and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Pair, facet, held, stream
from moeref_conformance.selftest.faults.base import Fault, cell


def everywhere(session: Session, cell: Cell, world: World) -> Any:
    """Every rank is given every tensor."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            dist.broadcast(full, src=0)
            del tensor
            yield meta, full
            del full

    return stream(session, rewrite)


def in_turn(session: Session, cell: Cell, world: World, receivers: int = 0) -> Any:
    """The ranks, or as many as the `receivers` that are counted, are given the tensors in turn."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for number, (meta, tensor) in enumerate(pairs):
            yield meta, tensor if number % (receivers or world.size) == world.rank else None
            del tensor

    return stream(everywhere(session, cell, world), rewrite)


def _one_receiver_too_many(session: Session, cell: Cell, world: World) -> Any:
    return in_turn(session, cell, world, world.size + 1)


def _every_stage_sends(session: Session, cell: Cell, world: World) -> Any:
    """The first rank of every pipeline stage opens a sender for the tensors of its stage."""
    first_layer = cell.layers // cell.layout.pp

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            of_last = meta.name.startswith(f"model.layers.{first_layer}.")
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            if of_last:
                dist.broadcast(full, src=0)
            del tensor
            yield meta, full if of_last or world.rank == 0 else None
            del full

    return stream(session, rewrite)


def _others_not_filled(session: Session, cell: Cell, world: World) -> Any:
    """Every rank hands out a buffer for each tensor, and only the writer's is filled."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            full = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            del tensor
            yield meta, full
            del full

    return stream(session, rewrite)


def _others_keep_the_first(session: Session, cell: Cell, world: World) -> Any:
    """Ranks other than the writer hand on what they were given in the first export."""
    kept: dict[str, torch.Tensor] = {}

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            if world.rank and tensor is not None:
                tensor = kept.setdefault(meta.name, tensor.clone()).clone()
            yield meta, tensor
            del tensor

    return stream(everywhere(session, cell, world), rewrite)


def _one_rank_ends_early(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            if not (world.rank == 1 and meta.name == "lm_head.weight"):
                yield meta, tensor
            del tensor

    return stream(session, rewrite)


def aliases(session: Session, cell: Cell, world: World) -> Any:
    """Where a parameter is a full tensor already, the stream hands out the parameter itself."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        live = {row.hf[0]: tensor for row, tensor in held(session, world) if len(row.hf) == 1}
        for meta, tensor in pairs:
            own = live.get(meta.name)
            yield meta, own if tensor is not None and own is not None and own.shape == tensor.shape else tensor
            del tensor

    return stream(session, rewrite)


def _writer_alone(session: Session, cell: Cell, world: World) -> Any:
    """Only the writer exports, and asks all ranks for their sizes first."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        sizes = [torch.zeros(1) for _ in range(world.size)]
        dist.all_gather(sizes, torch.ones(1))
        yield from pairs

    exporting = stream(session, rewrite)
    return exporting if world.rank == 0 else facet(session, "export", stream=lambda: iter(()))


def _sizes_differ(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        mine = torch.zeros(2 + world.rank)
        dist.all_reduce(mine)
        yield from pairs

    return stream(session, rewrite)


FAULTS = (
    Fault(
        id="materialised-everywhere",
        bug="miles#755: every rank holds the full tensor",
        rules=("EXP-005",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=everywhere,
    ),
    Fault(
        id="every-cp-rank-sends",
        bug="miles#1722: the writer is chosen by its data-parallel rank, which all context-parallel ranks share",
        rules=("EXP-005",),
        cell=cell("qwen3_moe", "cp2"),
        wrap=everywhere,
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
        id="other-receivers-not-filled",
        bug="W16 in kind: ranks other than the writer hand their engine buffers that nobody filled",
        rules=("EXP-009",),
        also=("EXP-005", "EXP-013"),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_others_not_filled,
        diagnosis="all zero",
    ),
    Fault(
        id="other-receivers-stay-at-the-first",
        bug="SkyRL#1345 in kind: every rank has an engine, and all but the writer's are sent the first weights again",
        rules=("EXP-009",),
        also=("EXP-013",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_others_keep_the_first,
        claims={"receivers": "all"},
        diagnosis="stale",
    ),
    Fault(
        id="share-of-nobody",
        bug="reported nowhere: shares are dealt out to one rank more than there are, and nobody has what it is dealt",
        rules=("EXP-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_one_receiver_too_many,
        claims={"receivers": "share"},
        says="was never sent",
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
        wrap=aliases,
        diagnosis="aliases a live parameter",
    ),
    Fault(
        id="writer-exports-alone",
        bug="ISEEKYAN/Megatron-LM#82: export on rank 0 only deadlocks",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_writer_alone,
        says="waits in all_gather, at roles.py:",
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
