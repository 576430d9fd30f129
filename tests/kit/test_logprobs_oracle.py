"""The oracle of log-probabilities and entropies, against torch's log_softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moeref_conformance.oracles.logprobs import of_tokens

pytestmark = pytest.mark.cpu


def test_every_token_but_the_first_has_both_up_to_the_end_of_its_row() -> None:
    torch.manual_seed(0)
    logits_BSV, lengths = 5 * torch.randn(2, 6, 7), (6, 3)
    tokens_BS = torch.randint(0, 7, (2, 6))
    tokens_BS[1, 3:] = -1
    expected: Any = SimpleNamespace(logits_BSV=logits_BSV, tokens_BS=tokens_BS, lengths=lengths)
    found = of_tokens(expected, 0.7)
    want_BSV = (logits_BSV[:, :-1].double() / 0.7).log_softmax(-1)
    for row, length in enumerate(lengths):
        at = slice(0, length - 1)
        want_S = want_BSV[row, at].gather(-1, tokens_BS[row, 1:length, None])[:, 0]
        torch.testing.assert_close(found["logprobs"][row, at], want_S)
        torch.testing.assert_close(found["entropies"][row, at], -(want_BSV.exp() * want_BSV).sum(-1)[row, at])
        assert all(bool(of[row, length - 1 :].isnan().all()) for of in found.values())
