"""Log-probabilities and entropies of tokens from transformers' logits, in fp64, position by position."""

from __future__ import annotations

import torch

from moeref_conformance.oracles.expected import Expected


def of_tokens(
    expected: Expected,
    temperature: float,
    logits_BSV: torch.Tensor | None = None,
    tokens_BS: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """`logprobs` and `entropies` [B, S - 1] of the tokens from the second on; NaN after the end of a row.

    Of transformers' logits and the kit's tokens, or of others that are given.
    """
    logits_BSV = expected.logits_BSV if logits_BSV is None else logits_BSV
    tokens_BS = expected.tokens_BS if tokens_BS is None else tokens_BS
    rows, length = tokens_BS.shape
    found = {name: torch.full((rows, length - 1), torch.nan).double() for name in ("logprobs", "entropies")}
    for row in range(rows):
        for position in range(expected.lengths[row] - 1):
            weights_V = (logits_BSV[row, position].double() / temperature).exp()
            shares_V = weights_V / weights_V.sum()
            found["logprobs"][row, position] = shares_V[tokens_BS[row, position + 1]].log()
            found["entropies"][row, position] = -(shares_V * shares_V.log()).sum()
    return found
