"""Which ranks an export gives each tensor to. Arithmetic that all ranks do alike, without torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

from moeref.bridge.shard_map import HFTensor
from moeref.dtypes import DTYPES
from moeref.exporter.units import unit_of
from moeref.layout import Layout

#: One rank; the first rank of every node; every rank, each a share of the tensors; every rank, each all of them.
Receivers = Literal["writer", "node", "share", "all"]
OPTIONS: tuple[str, ...] = get_args(Receivers)


def wrong(receivers: str, writer: int, ranks_per_node: int | None, layout: Layout) -> str:
    """Why these options of a plan name no receivers; "" if they do."""
    if receivers not in OPTIONS:
        return f"receivers={receivers!r} is none of {', '.join(OPTIONS)}"
    if type(writer) is not int or not 0 <= writer < layout.world:
        return f"writer={writer!r} is none of the {layout.world} ranks of {layout.text}"
    if writer and receivers != "writer":
        return f'writer={writer} goes with receivers="writer", not {receivers!r}'
    if (ranks_per_node is None) == (receivers == "node"):
        why = "say how many ranks a node has" if receivers == "node" else 'only receivers="node" has it'
        return f"ranks_per_node={ranks_per_node!r} with receivers={receivers!r}: {why}"
    if ranks_per_node is not None and (type(ranks_per_node) is not int or ranks_per_node < 1):
        return f"ranks_per_node={ranks_per_node!r} is no number of ranks"
    return ""


def common(receivers: str, writer: int, ranks_per_node: int | None, world: int) -> tuple[int, ...]:
    """The ranks that receive every tensor; for "share", those that receive any."""
    if receivers == "writer":
        return (writer,)
    return tuple(range(0, world, ranks_per_node or 1))


def shares(steps: Sequence[tuple[HFTensor, ...]], world: int) -> tuple[tuple[int, ...], ...]:
    """The receiver of each of the `steps`, which are tensors made together, in order.

    A unit that a loader needs whole (`unit_of`) goes to one rank: the one with the fewest bytes so far.
    """
    nbytes: dict[str, int] = {}
    for tensors in steps:
        unit = unit_of(tensors[0].name)
        nbytes[unit] = nbytes.get(unit, 0) + sum(DTYPES[t.dtype].bytes * prod(t.shape) for t in tensors)
    ranks = [(rank,) for rank in range(world)]
    loads = [(0, rank) for rank in range(world)]
    receivers: dict[str, tuple[int, ...]] = {}
    for unit, size in nbytes.items():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size, rank))
        receivers[unit] = ranks[rank]
    return tuple(receivers[unit_of(tensors[0].name)] for tensors in steps)
