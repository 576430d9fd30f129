"""Microbatches of packed samples: tokens, labels and positions, and which token attends to which."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moeref.dispatcher import padding
from moeref.layout import Layout
from moeref.megatron import batches, context, padding_mask

pytestmark = pytest.mark.cpu


def samples(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(10 * number, 10 * number + length) for number, length in enumerate(lengths, 1)]


def test_samples_are_padded_by_the_plan_and_the_last_to_a_common_length() -> None:
    layout = Layout(cp=2)
    first, second = batches.of_samples([samples(3, 5), samples(2)], padding.plan(layout))
    assert first.tokens_BS.tolist() == [[10, 11, 12, 0, 20, 21, 22, 23, 24, 0, 0, 0]]
    no = batches.IGNORED
    assert first.labels_BS.tolist() == [[11, 12, 10, no, 21, 22, 23, 24, 20, no, no, no]]
    assert first.padding_BS.int().tolist() == [[0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1]]
    assert first.positions_S.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert (first.cu_seqlens, second.cu_seqlens) == ((0, 4, 12), (0, 12))
    assert first.packed.max_seqlen_q == 8
    assert first.part(layout, 0).tolist() == [0, 3, 4, 5, 10, 11]
    joined = torch.cat([first.part(layout, rank) for rank in (0, 1)])
    assert joined[first.order(layout)].tolist() == list(range(12))
    cut = first.unpacked(first.tokens_BS[..., None])
    assert [row.flatten().tolist() for row in cut] == [[10, 11, 12], [20, 21, 22, 23, 24]]


def test_a_query_attends_to_its_own_sample_up_to_itself() -> None:
    whole = context.causal_mask((0, 3, 5), 1, 0, torch.device("cpu"))
    assert whole.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    keys = [0, 3, 4, 7, 1, 2, 5, 6]
    full = context.causal_mask((0, 4, 8), 1, 0, torch.device("cpu"))
    for rank in (0, 1):
        part = context.causal_mask((0, 4, 8), 2, rank, torch.device("cpu"))
        assert part.equal(full[keys[4 * rank : 4 * rank + 4]][:, keys])


@pytest.mark.parametrize("packs", [[], [[]], [[torch.zeros(0, dtype=torch.int64)]]])
def test_a_pack_without_tokens_is_refused(packs: list[list[torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        batches.of_samples(packs, padding.plan(Layout()))


def test_tokens_outside_a_mask_are_no_labels() -> None:
    mask_S, no = torch.tensor([False, True, False, True]), batches.IGNORED
    rows_BS = torch.arange(8).view(2, 4)
    first, second = batches.of_rows(rows_BS, 1, torch.stack([mask_S, mask_S & False]))
    assert (first.labels_BS.tolist(), second.labels_BS.tolist()) == ([[1, no, 3, no]], [[no] * 4])
    assert first.tokens_BS.tolist() == [[0, 1, 2, 3]]
    packs = [[rows_BS[0], rows_BS[1, :3]]]
    (packed,) = batches.of_samples(packs, padding.plan(Layout()), masks=[[mask_S, ~mask_S[:3]]])
    assert packed.labels_BS.tolist() == [[1, no, 3, no, no, 6, 4]]


@pytest.mark.parametrize("mask_BS", [torch.ones(2, 4), torch.ones(2, 3, dtype=torch.bool)])
def test_a_mask_of_another_kind_or_shape_is_refused(mask_BS: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"a loss mask is .*; it has to be bool \[2, 4\]"):
        batches.of_rows(torch.zeros(2, 4, dtype=torch.int64), 1, mask_BS)


def test_masks_of_fewer_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        batches.of_samples([samples(3, 5)], padding.plan(Layout()), masks=[[torch.ones(3, dtype=torch.bool)]])


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not divide into microbatches of 2"):
        batches.of_rows(torch.zeros(3, 4, dtype=torch.int64), 2)


@pytest.mark.parametrize(
    ("kind", "coefficient", "refused"),
    [
        ("seq_aux_loss", 0.01, True),
        ("seq_aux_loss", 0.0, False),
        ("aux_loss", 0.01, False),
        (["aux_loss", "seq_aux_loss"], [0.01, 0.01], True),
        (["aux_loss", "seq_aux_loss"], [0.01, 0.0], False),
    ],
)
def test_a_loss_of_each_sequence_is_refused_for_packs(kind: object, coefficient: object, refused: bool) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_moe_experts": 2}
    config = TransformerConfig(**sizes, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient)
    with pytest.raises(ValueError, match="over the whole pack") if refused else nullcontext():
        padding_mask.check_losses(config)
