"""Exporter bugs of the stream: what is sent at all, in which order, to whom, how often, and who takes part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.api import Cell, Session, World
from moeref_conformance.targets.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.targets.faults.rewrite import Pair, Rewritten


def _head_of_last_stage(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        kept: Pair | None = None
        for meta, tensor in stream:
            if meta.name == "model.embed_tokens.weight":
                kept = (replace(meta, name="lm_head.weight"), None if tensor is None else tensor.clone())
            yield meta, tensor
            del tensor
        if kept and cell.layout.pp > 1:
            yield kept

    return Rewritten(session, rewrite)


def _bucket_splits_group(session: Session, cell: Cell, world: World) -> Any:
    """The bucket is flushed by bytes alone; what of a layer's experts comes after the flush is never sent."""
    sent: dict[str, int] = {}

    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        sent.clear()
        for meta, tensor in stream:
            group = meta.name.split(".experts.")[0]
            if ".mlp.experts." in meta.name:
                sent[group] = sent.get(group, 0) + 4 * prod(meta.shape)
                if sent[group] > 300_000:
                    continue
            yield meta, tensor
            del tensor

    return Rewritten(session, rewrite)


def _first_export_again(session: Session, cell: Cell, world: World) -> Any:
    cache: list[Pair] = []

    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        if not cache:
            cache.extend((m, None if t is None else t.clone()) for m, t in stream)
        for meta, tensor in cache:
            yield meta, None if tensor is None else tensor.clone()

    return Rewritten(session, rewrite)


def _plan_sorted(session: Session, cell: Cell, world: World) -> Any:
    wrapped = Rewritten(session, lambda stream: stream)
    good = wrapped.plan
    wrapped.plan = lambda: sorted(good(), key=lambda meta: meta.name)
    return wrapped


def _everywhere(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            dist.broadcast(full, src=0)
            del tensor
            yield meta, full
            del full

    return Rewritten(session, rewrite)


def _aliases(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good = stream.export

    def export(plan: Any, rank: int, chunks: Any, group: Any = None) -> Iterator[Any]:
        live = {p.unit.hf[0].name: t for p, t in stream.bind(plan.table, rank, chunks) if len(p.unit.hf) == 1}
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
        id="head-of-the-last-stage",
        bug="B35: astraflow#9, a tied model exports lm_head at PP>1 only",
        rules=("EXP-001", "EXP-007"),
        also=(
            "EXP-004",
            "EXP-006",
        ),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_head_of_last_stage,
    ),
    Fault(
        id="bucket-splits-a-group",
        bug="B38: SkyRL#1471, experts after a bucket's flush are never sent",
        rules=("EXP-001",),
        also=(
            "EXP-004",
            "EXP-006",
        ),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_bucket_splits_group,
    ),
    Fault(
        id="first-export-again",
        bug="SkyRL#1345: conversion tasks reused, the second export is stale",
        rules=("EXP-006",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_first_export_again,
        diagnosis="stale",
    ),
    Fault(
        id="plan-in-another-order",
        bug="W4: SkyRL#1581, metadata order ≠ send order",
        rules=("EXP-004",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_plan_sorted,
    ),
    Fault(
        id="materialised-everywhere",
        bug="miles#755: every rank holds the full tensor",
        rules=("EXP-005",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_everywhere,
    ),
    Fault(
        id="live-parameters-handed-out",
        bug="megatron-bridge and mbridge alias 123 of 135 tensors at TP=1",
        rules=("EXP-008",),
        also=("EXP-005",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_aliases,
    ),
    Fault(
        id="writer-exports-alone",
        bug="ISEEKYAN/Megatron-LM#82: export on rank 0 only deadlocks",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_writer_alone,
        deadline=12.0,
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
