"""Context parallelism in plain torch: splits tokens, gathers keys and values, and restores the order of logits."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch.distributed import ProcessGroup

from moeref.layout import Layout, LayoutError, sequence


def part(length: int, layout: Layout, cp_rank: int) -> torch.Tensor:
    """The positions `[S/CP]` of a sequence that CP rank `cp_rank` computes, in its order.

    Raises LayoutError for a length that does not divide over CP·TP, or under CP over 2·CP chunks.
    """
    if length % (layout.cp * layout.tp):
        raise LayoutError(
            f"a sequence of {length} tokens is not divisible by cp·tp = {layout.cp}·{layout.tp} (layout {layout.text})"
        )
    return torch.tensor(sequence.zigzag(length, layout.cp, cp_rank))


def gather(local_S: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, concatenated along dim 0 in rank order. Backward sums each part's gradient over ranks."""
    whole_S: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(local_S.contiguous(), group=group)
    return whole_S


def restore(joined_S: torch.Tensor, cp: int) -> torch.Tensor:
    """The output of `gather` in the order of positions."""
    parts = [sequence.zigzag(len(joined_S), cp, rank) for rank in range(cp)]
    return joined_S[torch.tensor(sequence.restored(parts), device=joined_S.device)]


def causal_mask(length: int, cp: int, cp_rank: int, device: torch.device) -> torch.Tensor:
    """`[S/CP, S]`: whether each of this rank's queries attends to each key. Keys are in the order of `gather`."""
    keys_S = torch.tensor([p for rank in range(cp) for p in sequence.zigzag(length, cp, rank)], device=device)
    queries_Q = torch.tensor(sequence.zigzag(length, cp, cp_rank), device=device)
    return keys_S[None] <= queries_Q[:, None]
