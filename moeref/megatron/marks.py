"""The mark of sequence parallelism on a parameter."""

from __future__ import annotations

import torch


def mark_sequence_parallel(parameter: torch.nn.Parameter, marked: bool) -> None:
    """Say whether the gradient of `parameter` is a part that `finalize_model_grads` has to sum over TP.

    Under sequence parallelism each TP rank sees its own tokens only, so a parameter that is whole on every rank has a
    gradient of those tokens alone. megatron-core reads the attribute; torch does not know it.
    """
    setattr(parameter, "sequence_parallel", marked)  # noqa: B010
