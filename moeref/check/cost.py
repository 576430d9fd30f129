"""The cost part of the preflight: the memory of a rank, compared with that of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moeref.bridge import LocalShard, ShardMap
from moeref.check.report import Problem, Report
from moeref.costs import GIB, Training, fixes, largest, memory
from moeref.families import Model, SpecNames
from moeref.layout import Layout


@functools.lru_cache(maxsize=8)  # a run's policy and reference share them, and so do runs that differ in settings
def held(model: Model, layout: Layout, divisible_by: int) -> tuple[ShardMap, Mapping[int, tuple[LocalShard, ...]]]:
    """The shards of a rank of each pipeline rank, with their map. TP and EP ranks hold the same. Raises BridgeError."""
    shard_map = ShardMap(model, layout, SpecNames(norms="fused", experts="grouped"), divisible_by=divisible_by)
    shards = {pp: shard_map.local_shards(layout.rank_of(tp=0, pp=pp)) for pp in range(layout.pp)}
    return shard_map, MappingProxyType(shards)


def costed(report: Report, layout: Layout, divisible_by: int, problems: list[Problem]) -> Report:
    """The report with the memory of every stage; a problem if one needs more than the GPU has."""
    training, hbm = report.training, report.hbm
    _, shards = held(report.model, layout, divisible_by)
    found = memory(shards, layout, training)
    worst = largest(found)
    if hbm is not None and found[worst].peak > hbm * GIB:
        need = f"a rank of pp {worst} needs {found[worst].peak / GIB:.2f} GiB, more than the {hbm:g} GiB of a GPU"
        problems.append(Problem("memory", need, _fix(shards[worst], layout, training, hbm)))
    return replace(report, memory=MappingProxyType(found))


def _fix(shards: tuple[LocalShard, ...], layout: Layout, training: Training, hbm: float) -> str:
    """The settings that are enough alone, if any, and what of the layout holds less."""
    enough = [said for said, then in fixes(shards, layout, training) if then <= hbm * GIB]
    more = "a larger pp or ep holds less on a rank"
    return f"{' or '.join(enough)} is enough; {more}" if enough else more
