"""The cost part of the preflight: the memory of a rank, compared with that of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moeref.bridge import LocalShard, ShardMap
from moeref.check.report import CheckError, Padding, Problem, Report
from moeref.costs import (
    GIB,
    CostError,
    Engine,
    EngineSide,
    Memory,
    Recompute,
    Run,
    Shape,
    Waste,
    batch_problem,
    crossings,
    delta_share,
    dispatch_bytes,
    highest,
    largest,
    senders,
    waste,
)
from moeref.dtypes import DTYPES
from moeref.families import Model, SpecNames
from moeref.layout import Layout
from moeref.record import Draft

#: GiB that no GPU has.
LARGEST = 512


@functools.lru_cache(maxsize=8)  # a run's policy and reference share them, and so do runs that differ in settings
def held(model: Model, layout: Layout, divisible_by: int) -> tuple[ShardMap, Mapping[int, tuple[LocalShard, ...]]]:
    """The shards of a rank of each pipeline rank, with their map. TP and EP ranks hold the same. Raises BridgeError."""
    shard_map = ShardMap(model, layout, SpecNames(norms="fused", experts="grouped"), divisible_by=divisible_by)
    shards = {pp: shard_map.local_shards(layout.rank_of(tp=0, pp=pp)) for pp in range(layout.pp)}
    return shard_map, MappingProxyType(shards)


def costed(report: Report, draft: Draft, problems: list[Problem]) -> Report:
    """The report with the memory of every stage; a problem if one needs more than the GPU has."""
    _, shards = held(report.model, draft.layout, draft.options.divisible_by)
    run = Run(
        model=report.model,
        layout=draft.layout,
        shards=shards,
        training=report.training,
        recompute=Recompute.of(report.settings.values if report.settings else {}),
        tokens=_tokens(report),
        replay=report.replay != "off",
    )
    found = run.memory()
    if highest(found) > (report.hbm or LARGEST) * GIB:
        problems.append(_too_much(run, found, report.hbm))
    return replace(report, memory=MappingProxyType(found))


def spread(report: Report, layout: Layout, gpus_per_node: int | None, lengths: Mapping[int, int] | None) -> Report:
    """The report with groups over nodes, bytes of the dispatcher, and what padding wastes. A batch must divide.

    Raises CheckError for numbers that mean nothing.
    """
    group = report.settings.values.get("microbatch_group_size_per_vp_stage") if report.settings else None
    if batch := batch_problem(report.training, layout, group if type(group) is int else None):
        report = replace(report, problems=(*report.problems, Problem("batch", *batch)), record=None)
    try:
        nodes = crossings(layout, gpus_per_node) if gpus_per_node is not None else {}
        wasted = _wasted(report.padding, lengths) if lengths and report.padding else None
    except CostError as error:
        raise CheckError(str(error)) from error
    tokens, sent = _tokens(report), None
    if tokens is not None and report.dispatcher and layout.ep * layout.etp > 1:
        sent = dispatch_bytes(Shape(model=report.model, layout=layout, tokens=tokens), report.dispatcher)
    return replace(report, nodes=nodes, waste=wasted, dispatch_bytes=sent)


def _wasted(padding: Padding, lengths: Mapping[int, int]) -> Waste:
    """What padding wastes. Sequences that are not packed and have one length have that of the longest."""
    made = padding.plan
    if padding.one_length and made.fixed is None:
        made = replace(made, fixed=max(lengths))
    return waste(made, lengths, padding.length)


def synced(report: Report, layout: Layout, engine: str | None, density: float | None) -> Report:
    """The report with the engine's side: a problem for each thing that it refuses, and the bytes of a weight sync.

    Raises CheckError for an engine or a density that cannot be read.
    """
    try:
        size = DTYPES[report.model.param_dtype].bytes
        share = None if density is None else delta_share(density, size)
        if engine is None:
            return report
        there = Engine.parse(engine)
    except CostError as error:
        raise CheckError(str(error)) from error
    wrong = [Problem("engine", f"{there.name}: {text}", fix) for text, fix in there.problems(report.model)]
    delta = None if share is None else round(share * report.exported)
    side = EngineSide(there, tuple(there.facts(report.model)), report.exported, delta, senders(layout))
    record = None if wrong else report.record
    return replace(report, problems=(*report.problems, *wrong), engine=side, record=record)


def _tokens(report: Report) -> int | None:
    """Tokens of one microbatch, padding included; None if no length is given."""
    if report.padding is None or report.padding.padded is None:
        return None
    return report.padding.padded * report.training.micro_batch_size


def _too_much(run: Run, found: Mapping[int, Memory], hbm: float | None) -> Problem:
    """What a rank needs, and what is enough alone, if anything."""
    has = f"the {hbm:g} GiB of a GPU" if hbm else "GPUs have; --hbm says otherwise"
    worst = largest(found)
    need = f"a rank of pp {worst} needs {found[worst].peak / GIB:.2f} GiB, more than {has}"
    enough = [said for said, then in run.fixes() if then <= (hbm or LARGEST) * GIB]
    more = "a larger pp or ep holds less on a rank"
    return Problem("memory", need, f"{' or '.join(enough)} is enough; {more}" if enough else more)
