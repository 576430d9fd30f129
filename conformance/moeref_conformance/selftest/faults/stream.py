"""Exporter bugs of the stream: what is sent at all, in which order, how often, and from when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Pair, Rewritten


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


def _sorted_the_second_time(rooms: Rooms) -> Iterable[Edit]:
    stream = rooms["stream"]
    good, calls = stream.export, itertools.count()

    def export(plan: Any, *args: Any) -> Iterator[Any]:
        if next(calls):
            first = plan.steps
            plan = replace(plan)
            plan.__dict__["steps"] = tuple(sorted(first, key=lambda step: str(step.tensors[0].name)))
        return iter(good(plan, *args))

    return [Edit(stream, "export", export)]


def _embedding_twice(session: Session, cell: Cell, world: World) -> Any:
    """The last stage of a tied model exports its copy too, under the same name."""

    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        kept: Pair | None = None
        for meta, tensor in stream:
            if meta.name == "model.embed_tokens.weight":
                kept = meta, None if tensor is None else tensor.clone()
            yield meta, tensor
            del tensor
        if kept and cell.layout.pp > 1:
            yield kept

    return Rewritten(session, rewrite)


def _names_over_pp_only(rooms: Rooms) -> Iterable[Edit]:
    plan = rooms["plan"].Plan
    good = plan.steps.func

    def steps(self: Any) -> Any:
        mine = self.shard_map.layout.experts(0, self.shard_map.model.experts)
        return tuple(s for s in good(self) if s.params[0].expert is None or s.params[0].expert in mine)

    return [Edit(plan, "steps", property(steps))]


def _plan_without_bias(session: Session, cell: Cell, world: World) -> Any:
    wrapped = Rewritten(session, lambda stream: stream)
    good = wrapped.plan
    wrapped.plan = lambda: [meta for meta in good() if not meta.name.endswith("e_score_correction_bias")]
    return wrapped


def _embedding_cached(session: Session, cell: Cell, world: World) -> Any:
    cache: dict[str, torch.Tensor] = {}

    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            if tensor is not None and meta.name == "model.embed_tokens.weight":
                tensor = cache.setdefault(meta.name, tensor.clone()).clone()
            yield meta, tensor
            del tensor

    return Rewritten(session, rewrite)


def _wrapper_prefix(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            yield replace(meta, name=f"module.{meta.name}"), tensor
            del tensor

    wrapped = Rewritten(session, rewrite)
    good = wrapped.plan
    wrapped.plan = lambda: [replace(meta, name=f"module.{meta.name}") for meta in good()]
    return wrapped


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
        says="was never sent",
        one_rank=True,
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
        id="second-export-sorted",
        bug="W4 in time: the second export of a run sends in another order than the first announced",
        rules=("EXP-004",),
        cell=cell("qwen3_moe", "pp2"),
        edits=_sorted_the_second_time,
        says="entry 0 of export_changed",
    ),
    Fault(
        id="embedding-sent-twice",
        bug="B34: mbridge 9847825, the last stage's copy of a tied embedding is exported as well",
        rules=("EXP-001",),
        also=("EXP-004", "EXP-006", "EXP-007"),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_embedding_twice,
        says="was sent 2 times",
    ),
    Fault(
        id="names-over-pp-only",
        bug="Megatron-Bridge#4083, Megatron-Bridge#1716: names gathered over PP alone, one EP rank's experts exported",
        rules=("EXP-001", "EXP-007"),
        also=("EXP-006",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_names_over_pp_only,
        says="was never sent",
    ),
    Fault(
        id="plan-without-bias",
        bug="SkyRL#1505: export with and without explicit tasks disagree once a router has a bias",
        rules=("EXP-004",),
        cell=cell("glm4_moe", "pp2"),
        wrap=_plan_without_bias,
        says="e_score_correction_bias",
    ),
    Fault(
        id="embedding-cached",
        bug="W17: verl#6522, a cache survives the update",
        rules=("EXP-006",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_embedding_cached,
        diagnosis="stale",
    ),
    Fault(
        id="prefix-in-the-stream",
        bug="exported names keep the `module.` of a wrapper",
        rules=("EXP-001",),
        also=("EXP-006",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_wrapper_prefix,
        says="module.model.embed_tokens.weight is not in the checkpoint",
        one_rank=True,
    ),
)
