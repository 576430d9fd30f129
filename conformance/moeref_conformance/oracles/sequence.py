"""Which positions of a sequence a rank's MoE layers see, one position after the other."""

from __future__ import annotations

from collections.abc import Mapping

from moeref_conformance.contract.api import Layout


def positions(length: int, layout: Layout, at: Mapping[str, int], cut: str = "zigzag") -> list[int]:
    """Positions of a rank. CP cuts by `cut`, a value of `Claims.cp_cut`; of what a CP rank holds, sequence parallelism
    under tp > 1 gives each rank one run of equal length. Zigzag is Megatron-LM's `get_batch_on_this_cp_rank`.

    ValueError for a length that does not divide.
    """
    runs = cut == "runs" or layout.cp == 1
    chunks = layout.cp if runs else 2 * layout.cp
    if length % (chunks * layout.tp):
        raise ValueError(f"{length} tokens do not divide over cp={layout.cp}, tp={layout.tp}")
    held = (at["cp"],) if runs else (at["cp"], 2 * layout.cp - 1 - at["cp"])
    mine = [position for position in range(length) if position * chunks // length in held]
    share = len(mine) // layout.tp
    return [position for i, position in enumerate(mine) if i // share == at["tp"]]
