"""Steps with multi-token prediction layers whose loss would depend on the layout or the packing are refused."""

from __future__ import annotations

import pytest
import torch

from moeref.dispatcher import padding
from moeref.layout import Layout
from moeref.megatron import batches, mtp

pytestmark = pytest.mark.cpu
ROWS = batches.of_rows(torch.arange(8).reshape(2, 4), 1)


def test_rows_on_one_context_parallel_rank_are_taken() -> None:
    mtp.check(Layout(tp=2, pp=2, world=8), ROWS)


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cp=2: .* by each rank's own tokens"):
        mtp.check(Layout(cp=2), ROWS)


def test_packed_samples_are_refused() -> None:
    packed = batches.of_samples([[torch.arange(3), torch.arange(5)]], padding.plan(Layout()))
    with pytest.raises(ValueError, match="packed samples: "):
        mtp.check(Layout(), packed)


def test_a_loss_mask_is_refused() -> None:
    rows = batches.of_rows(torch.arange(8).reshape(2, 4), 1, torch.tensor([[False, True, True, True]] * 2))
    with pytest.raises(ValueError, match="a loss mask: "):
        mtp.check(Layout(), rows)


def test_the_decoders_logits_pass_through() -> None:
    losses = mtp.Losses(vocab=10)
    logits_SBV = torch.randn(4, 1, 12)
    assert torch.equal(losses(losses.labels(ROWS[0]), logits_SBV), logits_SBV.transpose(0, 1))
