"""Context parallelism in plain torch: which lengths it takes, and keys and values from all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch.distributed import ProcessGroup

from moeref.layout import Layout, LayoutError, sequence
from moeref.replay import rank_rows


def check_length(length: int, layout: Layout) -> None:
    """Raise LayoutError for a sequence that does not divide over CP·TP, or under CP over 2·CP chunks."""
    if length % (layout.cp * layout.tp):
        raise LayoutError(
            f"a sequence of {length} tokens is not divisible by cp·tp = {layout.cp}·{layout.tp} (layout {layout.text})"
        )
    sequence.zigzag(length, layout.cp, 0)


def gather(local_S: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, concatenated along dim 0 in rank order. Backward sums each part's gradient over ranks."""
    whole_S: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(local_S.contiguous(), group=group)
    return whole_S


def causal_mask(
    cu_seqlens: Sequence[int], cp: int, cp_rank: int, device: torch.device, before: int | None = None
) -> torch.Tensor:
    """`[S/CP, S]`: whether each of this rank's queries attends to each key: not later, and of the same sequence.

    Keys are in the order of `gather`. `cu_seqlens` cuts S into sequences. `before`: of a sliding window, how many keys
    before its own a query sees.
    """
    ends = torch.tensor(cu_seqlens[1:], device=device)
    keys_S, queries_Q = (
        torch.from_numpy(np.concatenate([rank_rows(cu_seqlens, cp=cp, cp_rank=rank) for rank in ranks])).to(device)
        for ranks in (range(cp), [cp_rank])
    )
    same_QS = torch.bucketize(queries_Q, ends, right=True)[:, None] == torch.bucketize(keys_S, ends, right=True)
    seen_QS = same_QS & (keys_S <= queries_Q[:, None])
    return seen_QS if before is None else seen_QS & (keys_S >= queries_Q[:, None] - before)
