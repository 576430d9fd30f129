"""Tensors that make room keep shape, strides, dtype and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeref.megatron.offload import Offloaded
from moeref.torch_dtypes import bits_of

pytestmark = pytest.mark.cpu


def test_values_come_back_bit_for_bit_whatever_their_shape() -> None:
    of = [torch.tensor(-0.0), torch.empty(0, 3), torch.arange(6.0).view(2, 3).T, torch.full((2,), torch.nan).bfloat16()]
    want = [one.clone() for one in of]
    kept = Offloaded(of)
    assert [one.numel() for one in of] == [0] * 4
    kept.back()
    for one, wanted in zip(of, want, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert (bits_of(one) == bits_of(wanted)).all()


def test_where_one_finds_no_room_none_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    of, good, calls = [torch.ones(2), torch.ones(3)], torch.Tensor.to, list[torch.Tensor]()
    kept = Offloaded(of)

    def to(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("the engine still has the memory")
        return good(tensor, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        kept.back()
    assert [one.numel() for one in of] == [0, 0]
    kept.back()
    assert [one.numel() for one in of] == [2, 3]
