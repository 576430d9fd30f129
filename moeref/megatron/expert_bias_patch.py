"""A patch for training experts with biases without Transformer Engine.

megatron-core's MLP adds the bias in place to the output of `linear_fc2`. In SequentialMLP that output is a view made by
a custom autograd function, and an in-place add on such a view raises under autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP


def _cloned(module: torch.nn.Module, inputs: Any, returned: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    output, bias = returned
    return output.clone(), bias


def patch_expert_biases(chunk: GPTModel) -> None:
    """Make `linear_fc2` of every expert of `chunk` return a clone of its output."""
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(_cloned)
