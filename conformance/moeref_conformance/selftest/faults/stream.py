"""Exporter bugs of the stream: what is sent at all, in which order, how often, and from when."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair, described, placed
from moeref_conformance.selftest.faults.base import Fault, cell


def _embedding_again(name: str) -> border.Change:
    """The last stage of a tied model exports its copy of the embedding too, as `name`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
            kept: Pair | None = None
            for meta, tensor in pairs:
                if meta.name == "model.embed_tokens.weight":
                    kept = replace(meta, name=name), None if tensor is None else tensor.clone()
                yield meta, tensor
                del tensor
            if kept and cell.layout.pp > 1:
                yield kept

        return border.stream(session, rewrite)

    return wrap


def _resumed(session: Any, cell: Cell, world: World) -> Any:
    """An export goes on where the last one was left."""
    under_way: list[Iterator[Pair]] = []

    def stream() -> Iterator[Pair]:
        if not under_way:
            under_way.append(iter(session.export.stream()))
        for pair in under_way[0]:
            yield pair
            del pair
        under_way.clear()

    return border.facet(session, "export", stream=stream)


def _tied_head_sent(session: Any, cell: Cell, world: World) -> Any:
    """A tied model announces and sends its head as well, after everything else, under every layout."""

    def head(meta: TensorMeta) -> TensorMeta:
        return replace(meta, name="lm_head.weight")

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        last: list[Pair] = []
        for meta, tensor in pairs:
            if meta.name == "model.embed_tokens.weight":
                last.append((head(meta), None if tensor is None else tensor.clone()))
            yield meta, tensor
            del tensor
        yield from last

    def plan() -> list[TensorMeta]:
        metas = list(session.export.plan())
        return [*metas, *(head(meta) for meta in metas if meta.name == "model.embed_tokens.weight")]

    return border.stream(border.facet(session, "export", plan=plan), rewrite)


def _bucket_splits_group(session: Any, cell: Cell, world: World) -> Any:
    """A bucket is flushed by its bytes alone; experts of a layer that come after the flush are never sent."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        sent: dict[str, int] = {}
        for meta, tensor in pairs:
            group = meta.name.split(".experts.")[0]
            if ".mlp.experts." in meta.name:
                sent[group] = sent.get(group, 0) + 4 * prod(meta.shape)
                if sent[group] > 300_000:
                    continue
            yield meta, tensor
            del tensor

    return border.stream(session, rewrite)


def _first_export_again(session: Any, cell: Cell, world: World) -> Any:
    cache: list[Pair] = []

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        if not cache:
            cache.extend((m, None if t is None else t.clone()) for m, t in pairs)
        for meta, tensor in cache:
            yield meta, None if tensor is None else tensor.clone()

    return border.stream(session, rewrite)


def _sorted_the_second_time(session: Any, cell: Cell, world: World) -> Any:
    calls = itertools.count()

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        metas, tensors = border.collected(pairs)
        for meta in sorted(metas, key=lambda meta: meta.name) if next(calls) else metas:
            yield meta, tensors.pop(meta.name, None)

    return border.stream(session, rewrite)


def _of_the_first_ep_rank(session: Any, cell: Cell, world: World) -> Any:
    """Plan and stream have the experts of EP rank 0 only."""

    def kept(meta: TensorMeta) -> TensorMeta | None:
        expert = re.search(r"\.experts\.(\d+)\.", meta.name)
        return meta if expert is None or int(expert[1]) < 16 // cell.layout.ep else None

    return described(kept)(session, cell, world)


def _by_local_number(session: Any, cell: Cell, world: World) -> Any:
    """The experts of a layer come by their number on a rank: 0 of every EP rank, then 1 of every EP rank."""
    local = 16 // cell.layout.ep

    def place(meta: TensorMeta) -> tuple[str, int, int]:
        """Sorts by what comes before the experts, then by local number."""
        expert = re.search(r"(.*\.experts\.)(\d+)\.", meta.name)
        return (expert[1], int(expert[2]) % local, int(expert[2])) if expert else (meta.name, 0, 0)

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        metas, tensors = border.collected(pairs)
        for meta in sorted(metas, key=place):
            yield meta, tensors.pop(meta.name, None)

    planned = border.facet(session, "export", plan=lambda: sorted(session.export.plan(), key=place))
    return border.stream(planned, rewrite)


def one_buffer(session: Any, cell: Cell, world: World) -> Any:
    """All tensors come in one buffer, which the next one overwrites."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        buffer = torch.empty(2**22, dtype=torch.uint8)
        for meta, tensor in pairs:
            if tensor is None:
                yield meta, None
                continue
            yield meta, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            del tensor

    return border.stream(session, rewrite)


def _by_memory(session: Any, cell: Cell, world: World) -> Any:
    """A stream is made anew only if a parameter lies elsewhere than before."""
    cache: list[Pair] = []
    places: list[list[int]] = []

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        now = [parameter.data_ptr() for chunk in session.export.chunks() for parameter in chunk.parameters()]
        if places[-1:] != [now]:
            places.append(now)
            cache[:] = [(meta, None if tensor is None else tensor.clone()) for meta, tensor in pairs]
        for meta, tensor in cache:
            yield meta, None if tensor is None else tensor.clone()

    return border.stream(session, rewrite)


def _found_by_memory(session: Any, cell: Cell, world: World) -> Any:
    """Where experts have to be gathered, those of the model are found by where they lay in the first stream."""
    places: list[list[int]] = []

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        places.append([parameter.data_ptr() for chunk in session.export.chunks() for parameter in chunk.parameters()])
        found = cell.layout.ep == 1 or places[-1] == places[0]
        for meta, tensor in pairs:
            if found or ".experts." not in meta.name:
                yield meta, tensor
            del tensor

    return border.stream(session, rewrite)


def _first_memory(session: Any, cell: Cell, world: World) -> Any:
    """Every stream reads the memory that the parameters had during the first one."""
    return reading(session, {})


def reading(session: Any, memory: dict[torch.nn.Parameter, torch.Tensor]) -> Any:
    """`session` whose stream reads parameters from `memory`; those not in it from where they are, ever after."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        own = (parameter for chunk in session.export.chunks() for parameter in chunk.parameters())
        with placed({parameter: memory.setdefault(parameter, parameter.data) for parameter in own}):
            yield from pairs

    return border.stream(session, rewrite)


def _trained_alone(session: Any, cell: Cell, world: World) -> Any:
    """A stream has the tensors alone that are trained, and buffers."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        parameters = {(c, n): p for c, chunk in enumerate(session.export.chunks()) for n, p in chunk.named_parameters()}
        rows = session.names.table(world.rank)
        of_rows = [(row, parameters.get((row.chunk, row.local))) for row in rows]
        frozen = {name for row, p in of_rows if p is not None and not p.requires_grad for name in row.hf}
        for meta, tensor in pairs:
            if meta.name not in frozen:
                yield meta, tensor
            del tensor

    return border.stream(session, rewrite)


def _what_changed(session: Any, cell: Cell, world: World) -> Any:
    """A stream has the tensors alone that differ from those of the last one that came to its end."""
    sent: dict[str, torch.Tensor] = {}

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        now: dict[str, torch.Tensor] = {}
        for meta, tensor in pairs:
            if tensor is not None:
                now[meta.name] = tensor.clone()
            if tensor is None or meta.name not in sent or not torch.equal(sent[meta.name], tensor):
                yield meta, tensor
            del tensor
        sent.update(now)

    return border.stream(session, rewrite)


def _embedding_cached(session: Any, cell: Cell, world: World) -> Any:
    cache: dict[str, torch.Tensor] = {}

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            if tensor is not None and meta.name == "model.embed_tokens.weight":
                tensor = cache.setdefault(meta.name, tensor.clone()).clone()
            yield meta, tensor
            del tensor

    return border.stream(session, rewrite)


FAULTS = (
    Fault(
        id="broken-off-stream-goes-on",
        bug="SkyRL#1345 in kind: tasks are used up one by one, and after an update that broke off the rest is sent",
        rules=("EXP-006",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "one"),
        wrap=_resumed,
        one_rank=True,
        says="model.embed_tokens.weight was never sent",
    ),
    Fault(
        id="head-of-the-last-stage",
        bug="B35: astraflow#9, a tied model exports lm_head at PP>1 only",
        rules=("EXP-007",),
        also=("EXP-004", "EXP-011"),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_embedding_again("lm_head.weight"),
    ),
    Fault(
        id="tied-head-sent",
        bug="slime in kind: a tied head is sent beside the embedding that it is",
        rules=("EXP-011",),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_tied_head_sent,
        says="lm_head.weight was sent, which repeats model.embed_tokens.weight",
        one_rank=True,
    ),
    Fault(
        id="bucket-splits-a-group",
        bug="B38: SkyRL#1471, experts after a bucket's flush are never sent",
        rules=("EXP-001",),
        also=("EXP-004",),
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
        wrap=border.planned(lambda metas: sorted(metas, key=lambda meta: meta.name)),
    ),
    Fault(
        id="second-export-sorted",
        bug="W4 in time: the second export of a run sends in another order than the first announced",
        rules=("EXP-004",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_sorted_the_second_time,
        says="entry 0 of export_changed",
    ),
    Fault(
        id="experts-by-local-number",
        bug="Megatron-Bridge 0.6.2, gather_from_ep_ranks: the order of names depends on EP, the bytes are right",
        rules=("EXP-010",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_by_local_number,
        says="the one-rank export has",
        one_rank=True,
    ),
    Fault(
        id="embedding-sent-twice",
        bug="B34: mbridge 9847825, the last stage's copy of a tied embedding is exported as well",
        rules=("EXP-001",),
        also=("EXP-004", "EXP-007"),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=_embedding_again("model.embed_tokens.weight"),
        says="was sent 2 times",
    ),
    Fault(
        id="names-over-pp-only",
        bug="Megatron-Bridge#4083, Megatron-Bridge#1716: names gathered over PP alone, one EP rank's experts exported",
        rules=("EXP-001", "EXP-007"),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_of_the_first_ep_rank,
        says="was never sent",
    ),
    Fault(
        id="plan-without-bias",
        bug="SkyRL#1505: export with and without explicit tasks disagree once a router has a bias",
        rules=("EXP-004",),
        cell=cell("glm4_moe", "pp2"),
        wrap=border.planned(
            lambda metas: [meta for meta in metas if not meta.name.endswith("e_score_correction_bias")]
        ),
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
        id="frozen-not-sent",
        bug="RLinf#1171 in kind: parameters without requires_grad are left out, also for an engine that has none yet",
        rules=("EXP-006",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "one"),
        wrap=_trained_alone,
        says="was never sent",
        one_rank=True,
    ),
    Fault(
        id="unchanged-not-sent",
        bug="miles#881, TRL#5932: tensors that are as they were are left out, also for an engine that has lost its own",
        rules=("EXP-006",),
        cell=cell("qwen3_moe", "one"),
        wrap=_what_changed,
        says="was never sent",
        one_rank=True,
    ),
    Fault(
        id="cache-keyed-by-memory",
        bug="SkyRL#1345 in kind: what was exported is sent again until a weight lies elsewhere; steps write in place",
        rules=("EXP-006",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_by_memory,
        diagnosis="stale",
    ),
    Fault(
        id="experts-found-by-memory",
        bug="verl's offloading sets `.data`: what has to be gathered is looked up by its address, and is not found",
        rules=("EXP-013",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_found_by_memory,
        says="experts.0.down_proj.weight was not sent from new memory",
    ),
    Fault(
        id="memory-of-the-first-export",
        bug="verl's offloading sets `.data`: who holds the tensors of the first export goes on sending them",
        rules=("EXP-013",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_first_memory,
        diagnosis="read from the memory of before",
    ),
    Fault(
        id="one-buffer-for-all",
        bug="verl#7083 in kind: the buffer of a tensor is used again while its receiver still holds it",
        rules=("EXP-012",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=one_buffer,
        diagnosis="overwritten by a later one",
    ),
    Fault(
        id="buffers-never-sent",
        bug="verl#5801: named_parameters is iterated, and the router's bias is a buffer",
        rules=("EXP-001",),
        cell=cell("glm4_moe", "pp2"),
        wrap=described(lambda meta: None if meta.name.endswith("e_score_correction_bias") else meta),
        says="e_score_correction_bias was never sent",
        one_rank=True,
    ),
    Fault(
        id="names-mapped-back-twice",
        bug="prime-rl#2690: names that are the checkpoint's already go through the inverse map again",
        rules=("EXP-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=described(lambda meta: replace(meta, name=meta.name.replace(".mlp.", ".block_sparse_moe."))),
        says="block_sparse_moe",
        one_rank=True,
    ),
    Fault(
        id="prefix-in-the-stream",
        bug="exported names keep the `module.` of a wrapper",
        rules=("EXP-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=described(lambda meta: replace(meta, name=f"module.{meta.name}")),
        says="module.model.embed_tokens.weight is not in the checkpoint",
        one_rank=True,
    ),
)
