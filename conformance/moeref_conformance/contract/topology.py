"""Coordinates and process groups of each rank, by megatron-core's RankGenerator of the dense and the expert grid.

In the layout's order, which is megatron-core's default tp-cp-ep-dp-pp unless claimed otherwise, the dense grid is
tp × cp × dp × pp and the expert grid etp × ep × edp × pp. Nothing here does rank arithmetic of its own; a coordinate is
a rank's index in its group of that kind.
"""

from __future__ import annotations

import math
from functools import lru_cache

from moeref_conformance.contract.api import Cell, Layout

#: kind -> (grid, RankGenerator token). `mp` is the model-parallel group, `emp` its counterpart of the expert grid.
KINDS = {
    "tp": ("dense", "tp"),
    "pp": ("dense", "pp"),
    "cp": ("dense", "cp"),
    "dp": ("dense", "dp"),
    "dp_cp": ("dense", "dp-cp"),
    "tp_cp": ("dense", "tp-cp"),
    "mp": ("dense", "tp-pp"),
    "ep": ("expert", "ep"),
    "etp": ("expert", "tp"),
    "edp": ("expert", "dp"),
    "etp_ep": ("expert", "tp-ep"),
    "emp": ("expert", "tp-ep-pp"),
}
AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "edp")


def groups(layout: Layout) -> dict[str, list[list[int]]]:
    """All groups of every kind in KINDS as lists of global ranks, in RankGenerator's order.

    Raises ValueError if the world is not a multiple of either grid.
    """
    return {kind: [list(group) for group in found] for kind, found in _groups(layout).items()}


def group(layout: Layout, kind: str, rank: int) -> list[int]:
    """The ranks of the group of this kind that `rank` is in, in its order."""
    return list(next(ranks for ranks in _groups(layout)[kind] if rank in ranks))


def coords(layout: Layout, rank: int) -> dict[str, int]:
    """The coordinates of `rank`: its index in its group of each of AXES. Raises ValueError for a rank out of range."""
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank {rank} is not in the world of {layout.text} (0..{layout.world - 1})")
    return dict(zip(AXES, _places(layout)[rank], strict=True))


def last_stage(layout: Layout, rank: int) -> bool:
    """Whether a rank is of the last pipeline stage, which has the logits."""
    return coords(layout, rank)["pp"] == layout.pp - 1


def inner_stage(layout: Layout, rank: int) -> bool:
    """Whether a rank is of a pipeline stage that is neither the first one nor the last."""
    return 0 < coords(layout, rank)["pp"] < layout.pp - 1


def coords_text(layout: Layout, rank: int) -> str:
    """`tp0 pp1 ep1 etp0 dp0`; `cp` is named where the layout has it."""
    at = coords(layout, rank)
    axes = ["tp", "pp", *(["cp"] if layout.cp > 1 else []), "ep", "etp", "dp"]
    return " ".join(f"{axis}{at[axis]}" for axis in axes)


def replica_rows(cell: Cell, rank: int, samples: int) -> range:
    """Which of the `samples` rows of a training step the data-parallel replica of `rank` takes.

    All replicas take whole microbatches and the same number, so the mean over replicas is that over all rows.
    """
    replicas = group(cell.layout, "dp", rank)
    parts = math.gcd(samples // cell.rows, len(replicas))
    return range(replicas.index(rank) % parts, samples, parts)


def step_order(rows: int, cell: Cell) -> list[int]:
    """The numbers of the rows of a step, which an interleaved schedule repeats.

    2·PP microbatches bring it into its steady state, where sends of both directions cross. Microbatches come in an
    order without a period, so that one that is taken for another some microbatches before it is seen.
    """
    microbatches = [range(first, first + cell.rows) for first in range(0, rows, cell.rows)]
    repeated = 2 * cell.layout.pp // len(microbatches) if cell.layout.vpp > 1 else 1
    firsts = [number.bit_count() % len(microbatches) for number in range(repeated)]  # the Thue–Morse sequence
    return [row for first in firsts for of in microbatches[first:] + microbatches[:first] for row in of]


def step_rows(cell: Cell, rank: int, samples: int) -> list[int]:
    """The rows of the tokens that this rank's replica computes in a step, in their order."""
    own = replica_rows(cell, rank, samples)
    return [own[number] for number in step_order(len(own), cell)]


def microbatches(cell: Cell, samples: int) -> tuple[tuple[int, ...], ...]:
    """The rows of each microbatch of a training step, those of all replicas."""
    replicas = {tuple(replica_rows(cell, rank, samples)) for rank in range(cell.layout.world)}
    return tuple(sorted(rows[at : at + cell.rows] for rows in replicas for at in range(0, len(rows), cell.rows)))


@lru_cache(maxsize=256)
def _places(layout: Layout) -> list[tuple[int, ...]]:
    """The coordinates of every rank, in the order of AXES."""
    members = _groups(layout)
    by_axis = [{rank: place for group in members[axis] for place, rank in enumerate(group)} for axis in AXES]
    return [tuple(of[rank] for of in by_axis) for rank in range(layout.world)]


@lru_cache(maxsize=256)
def _groups(layout: Layout) -> dict[str, list[list[int]]]:
    from megatron.core.parallel_state import RankGenerator

    grids = {}
    for grid, sizes, tp, ep, cp in (
        ("dense", "tp·pp·cp", layout.tp, 1, layout.cp),
        ("expert", "etp·ep·pp", layout.expert_tp, layout.ep, 1),
    ):
        size = tp * ep * cp * layout.pp
        if layout.world % size:
            raise ValueError(f"layout {layout.text}: world {layout.world} is not a multiple of {sizes} = {size}")
        dp = layout.world // size
        grids[grid] = RankGenerator(tp=tp, ep=ep, dp=dp, pp=layout.pp, cp=cp, order=layout.order, rank_offset=0)
    return {kind: grids[grid].get_ranks(token) for kind, (grid, token) in KINDS.items()}
