"""The loss of multi-token prediction layers: of which labels, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from moeref.dispatcher import padding
from moeref.layout import Layout
from moeref.megatron import batches, mtp

pytestmark = pytest.mark.cpu
ROWS = batches.of_rows(torch.arange(8).reshape(2, 4), 2)
PACK = batches.of_samples([[torch.arange(3), torch.arange(10, 15)]], padding.plan(Layout(cp=2)))
NONE = batches.IGNORED


def config(**settings: Any) -> Any:
    given = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    return SimpleNamespace(**{**given, "mtp_loss_scaling_factor": 0.5, **settings})


def test_labels_ahead_end_with_each_row() -> None:
    assert ROWS[0].ahead(0).tolist() == [[1, 2, 3, 0], [5, 6, 7, 4]]
    assert ROWS[0].ahead(2).tolist() == [[3, 0, NONE, NONE], [7, 4, NONE, NONE]]
    assert ROWS[0].ahead(5).tolist() == [[NONE] * 4] * 2


def test_labels_ahead_end_with_each_packed_sample_and_not_with_its_padding() -> None:
    (of,) = PACK
    assert of.labels_BS.tolist() == [[1, 2, 0, NONE, 11, 12, 13, 14, 10, NONE, NONE, NONE]]
    assert of.ahead(1).tolist() == [[2, 0, NONE, NONE, 12, 13, 14, 10, NONE, NONE, NONE, NONE]]


@pytest.mark.parametrize("settings", [{"moe_aux_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.1}])
def test_packed_samples_are_refused_where_their_padding_would_count(settings: dict[str, Any]) -> None:
    mtp.check(config(), PACK, bias_rate=0.0)
    mtp.check(config(**settings), ROWS, bias_rate=0.1)
    with pytest.raises(ValueError, match="packed samples with MTP layers: "):
        mtp.check(config(**settings), PACK, bias_rate=0.0)


def test_packed_samples_are_refused_with_updates_of_the_bias() -> None:
    with pytest.raises(ValueError, match="set coefficients and bias_rate to 0"):
        mtp.check(config(), PACK, bias_rate=0.1)


def test_the_decoders_logits_pass_through_and_megatrons_own_loss_of_a_layer_is_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mtp.tensor_parallel, "gather_from_tensor_model_parallel_region", lambda logits: logits)
    losses, at_S = mtp.Losses(10, config(), shares=[3.0, 0.0]), torch.tensor([0, 3])
    own_BS = losses.labels(ROWS[0], at_S)
    logits_LSBV = torch.randn(3, 2, 2, 12)
    assert own_BS is not None
    assert not any(losses(own_BS.clone(), logits_SBV).any() for logits_SBV in logits_LSBV[:2])
    assert torch.equal(losses(own_BS, logits_LSBV[2]), logits_LSBV[2].transpose(0, 1))
    first_BV = logits_LSBV[0, 0, :, :10]  # the last position has no label a position on
    second_BV = logits_LSBV[1, 0, :, :10]
    of = [cross_entropy(first_BV, torch.tensor([2, 6]), reduction="sum") / 3]
    of += [cross_entropy(second_BV, torch.tensor([3, 7]), reduction="sum")]
    assert float(losses.added) == pytest.approx(float(0.5 / 2 * sum(of)))
