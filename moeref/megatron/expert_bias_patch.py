"""Experts with biases that can be trained without Transformer Engine.

megatron-core's MLP adds an expert's bias in place to what `linear_fc2` returned. There that is what a custom autograd
function took in and returned, a view, to which autograd lets nobody write: a forward with gradients raises.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP


def _copied(module: torch.nn.Module, given: Any, returned: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    output, bias = returned
    return output.clone(), bias


def patch_expert_biases(chunk: GPTModel) -> None:
    """Have `linear_fc2` of every expert of `chunk` return a tensor of its own."""
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(_copied)
