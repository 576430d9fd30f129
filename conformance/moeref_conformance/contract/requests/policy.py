"""What the facet `policy` is asked for, at the other temperature and under the routes of `requests.logprobs`."""

from __future__ import annotations

import torch

#: How much an entropy counts beside an advantage of 1.
ENTROPY = 0.5
#: The steps under given routes: one that keeps activations, and one that recomputes them.
REPLAYED = ("replayed_policy", "recomputed_policy")


def advantages(tokens_BS: torch.Tensor) -> torch.Tensor:
    """The advantage of each token [B, S], in fp32: of both signs, and another one for neighbours in row and column.

    bf16 holds none of them exactly but 0.
    """
    rows, length = tokens_BS.shape
    of_rows_B1, of_places_S = 5 * torch.arange(rows)[:, None], 3 * torch.arange(length)
    return ((of_rows_B1 + of_places_S) % 11 - 4) / 3.7
