"""What is offloaded stays offloaded where there is no room to take it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeref.megatron.offload import Offloaded
from moeref.megatron.optimizer import Trainer
from moeref.torch_dtypes import bits_of

pytestmark = pytest.mark.cpu


class Full:
    """A DistributedDataParallel, or what is offloaded, that finds no room on the device once."""

    def __init__(self, kept: Offloaded | None = None) -> None:
        self.kept, self.calls = kept, 0

    def back(self, **_: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError("the engine still has the memory")
        if self.kept:
            self.kept.back()

    restore_grad_buffers = back

    def offload_grad_buffers(self, **_: Any) -> None:
        pass


def _trainer(wrapped: list[Full], **offloaded: Any) -> Trainer:
    trainer = Trainer.__new__(Trainer)
    vars(trainer).update(_offloaded=offloaded, _hooks=[], _wrapped=wrapped, _on_gpu=False)
    return trainer


def test_values_come_back_bit_for_bit_whatever_their_shape() -> None:
    of = [torch.tensor(-0.0), torch.empty(0, 3), torch.arange(6.0).view(2, 3).T, torch.full((2,), torch.nan).bfloat16()]
    want = [one.clone() for one in of]
    kept = Offloaded(of)
    assert [one.numel() for one in of] == [0] * 4
    kept.back()
    for one, wanted in zip(of, want, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert (bits_of(one) == bits_of(wanted)).all()


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_that_find_no_room_can_be_taken_back_later(weights_only: bool) -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))
    trainer = _trainer([], weights=Full(Offloaded([weight])))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.onload(weights_only=weights_only)
    trainer.onload(weights_only=weights_only)
    assert weight.tolist() == [0.0, 1.0, 2.0]
    trainer._check_here()


def test_an_optimizer_whose_gradients_find_no_room_is_not_whole() -> None:
    moment = torch.arange(3.0)
    wrapped = Full()
    trainer = _trainer([wrapped], optimizer=Offloaded([moment]))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.onload()
    assert (list(trainer._offloaded), moment.numel()) == (["optimizer"], 0)
    trainer.onload()
    assert (moment.tolist(), wrapped.calls, trainer._offloaded) == ([0.0, 1.0, 2.0], 2, {})
