"""Owns what happens to a routing map before dispatch: dropping over capacity, alignment for quantisation, padding rows.

Shapes: T rows, E experts, k experts a row. Weights are (T, E), zero where a row does not go, and maps are boolean.
"""

from __future__ import annotations

import math

import torch

from moeref.dispatcher.padding import pad_experts
from moeref.dispatcher.setup import DispatcherError


def capacity(rows: int, topk: int, experts: int, factor: float) -> int:
    """Places of an expert: ⌈rows·topk/experts · factor⌉, as megatron-core's `get_capacity` computes it."""
    return math.ceil((rows * topk / experts) * factor)


def drop(
    weights_TE: torch.Tensor,
    map_TE: torch.Tensor,
    topk: int,
    factor: float,
    *,
    policy: str = "probs",
    pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and map with at most `capacity` rows an expert; with `pad` exactly so many, more of weight zero.

    "probs" keeps the largest weights and "position" the first rows; among equals the first rows win, which
    megatron-core leaves to its sort. Raises DispatcherError for another policy, and for `pad` with more places than
    rows.
    """
    rows, experts = map_TE.shape
    places = capacity(rows, topk, experts, factor)
    if policy not in ("probs", "position"):
        raise DispatcherError(f"drop policy {policy!r} is neither probs nor position")
    if places > rows:
        if pad:
            raise DispatcherError(f"{places} places for {rows} rows: keep the capacity factor at most experts/topk")
        return weights_TE * map_TE, map_TE
    ranked = weights_TE.detach() if policy == "probs" else map_TE.int()
    kept = torch.zeros_like(map_TE)
    kept.scatter_(0, ranked.argsort(dim=0, descending=True, stable=True)[:places], True)
    found = kept if pad else kept & map_TE
    return weights_TE * found, found


def aligned(map_TE: torch.Tensor, multiple: int) -> torch.Tensor:
    """The map with rows added to each expert, first ones first, up to a multiple of `multiple`.

    Added rows weigh zero, since weights stay as they are. If an expert runs out of rows it gets all of them.
    """
    wanted = -map_TE.sum(0) % multiple
    return map_TE | ((~map_TE).cumsum(0) <= wanted)


def pad_rows(
    experts_TK: torch.Tensor, weights_TK: torch.Tensor, padding_T: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and weights in which padding rows go to k distinct experts, spread over all, with weight zero."""
    topk = experts_TK.shape[1]
    rows = [pad_experts(row, topk, experts) for row in range(int(padding_T.sum()))]
    found = experts_TK.clone()
    found[padding_T] = experts_TK.new_tensor(rows).reshape(-1, topk)
    return found, weights_TK.masked_fill(padding_T[:, None], 0)


def expert_counts(map_TE: torch.Tensor, padding_T: torch.Tensor) -> torch.Tensor:
    """Rows of each expert without padding rows: what bias updates and balance statistics have to be made from."""
    return (map_TE & ~padding_T[:, None]).sum(0)
