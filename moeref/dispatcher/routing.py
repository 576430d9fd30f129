"""Changes to a routing map before dispatch: dropping over capacity, alignment for quantisation, padding rows.

Shapes: T rows, E experts, k experts per row. Weights and boolean maps are (T, E); weights are zero where the map is
False.
"""

from __future__ import annotations

import math

import torch

from moeref.dispatcher.padding import pad_experts
from moeref.dispatcher.setup import DispatcherError


def capacity(rows: int, topk: int, experts: int, factor: float) -> int:
    """The capacity of an expert: ⌈rows·topk/experts · factor⌉, as in megatron-core's `get_capacity`."""
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
    """Weights and map with at most `capacity` rows per expert; with `pad` exactly as many, added rows of weight zero.

    "probs" keeps the rows with the largest weights, "position" the first rows. Ties go to the first rows; in
    megatron-core they depend on its sort. Raises DispatcherError for another policy, and for `pad` with a capacity
    above the number of rows.
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
    """The map with rows added to each expert, from the first row on, up to a multiple of `multiple`.

    Added rows have weight zero, because weights do not change. An expert gets at most all rows.
    """
    wanted = -map_TE.sum(0) % multiple
    return map_TE | ((~map_TE).cumsum(0) <= wanted)


def pad_rows(
    experts_TK: torch.Tensor, weights_TK: torch.Tensor, padding_T: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and weights in which padding rows have weight zero and k distinct experts, spread over all experts."""
    topk = experts_TK.shape[1]
    rows = [pad_experts(row, topk, experts) for row in range(int(padding_T.sum()))]
    found = experts_TK.clone()
    found[padding_T] = experts_TK.new_tensor(rows).reshape(-1, topk)
    return found, weights_TK.masked_fill(padding_T[:, None], 0)


def expert_counts(map_TE: torch.Tensor, padding_T: torch.Tensor) -> torch.Tensor:
    """Rows per expert without padding rows, for bias updates and balance statistics."""
    return (map_TE & ~padding_T[:, None]).sum(0)
