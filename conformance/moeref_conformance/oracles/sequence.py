"""Which positions of a sequence a rank's MoE layers see, one position after the other."""

from __future__ import annotations

from collections.abc import Mapping

from moeref_conformance.contract.api import Layout


def positions(length: int, layout: Layout, at: Mapping[str, int]) -> list[int]:
    """Megatron-LM's `get_batch_on_this_cp_rank`: chunks r and 2·cp-1-r of 2·cp; of these, under tp > 1, sequence
    parallelism gives each rank one run of equal length. ValueError for a length that does not divide."""
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if length % (chunks * layout.tp):
        raise ValueError(f"{length} tokens do not divide over cp={layout.cp}, tp={layout.tp}")
    mine = []
    for position in range(length):
        chunk = position * chunks // length
        if layout.cp == 1 or chunk in (at["cp"], 2 * layout.cp - 1 - at["cp"]):
            mine.append(position)
    share = len(mine) // layout.tp
    return [position for i, position in enumerate(mine) if i // share == at["tp"]]
