"""The attribute `sequence_parallel` of a parameter."""

from __future__ import annotations

import torch


def mark_sequence_parallel(parameter: torch.nn.Parameter, marked: bool) -> None:
    """Set whether `finalize_model_grads` sums the gradient of `parameter` over TP.

    Under sequence parallelism each TP rank has only its own tokens, so the gradient of a replicated parameter covers
    only these. megatron-core reads the attribute.
    """
    setattr(parameter, "sequence_parallel", marked)  # noqa: B010
