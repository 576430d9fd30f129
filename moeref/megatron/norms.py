"""RMSNorm of torch as a module of megatron-core's local spec.

megatron-core's wrapper of it refuses sequence parallelism and ignores `layernorm_zero_centered_gamma`. Its local spec
uses apex's norm if apex is installed, which has no RMSNorm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.megatron.marks import mark_sequence_parallel

_OF_A_LAYER = ("input_layernorm", "pre_mlp_layernorm")
_OF_ATTENTION = ("q_layernorm", "k_layernorm", "kv_layernorm")
_OF_MTP = ("enorm", "hnorm", "layer_norm")


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool) -> torch.Tensor:
    """RMSNorm of the last axis in fp32, in the dtype of `hidden`: scaled by `weight`, or by 1 + `weight`.

    In bf16, adding 1 would round the weight.
    """
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    return torch.nn.functional.rms_norm(hidden.float(), scale.shape, scale, eps).type_as(hidden)


class TorchNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with the constructor of Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        mark_sequence_parallel(self.weight, config.sequence_parallel)


class Norm(torch.nn.Module):
    """RMSNorm in fp32 that scales by `weight`, or by 1 + `weight` if `zero_centered`. Begins as a scale of 1."""

    zero_centered = False

    def __init__(self, config: Any, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 0.0 if self.zero_centered else 1.0))
        mark_sequence_parallel(self.weight, config.sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normalised input, in the dtype of `hidden`."""
        return rms_norm(hidden, self.weight, self.eps, zero_centered=self.zero_centered)


class ZeroCenteredNorm(Norm):
    """RMSNorm that scales by 1 + `weight`, like transformers' Qwen3NextRMSNorm."""

    zero_centered = True


def in_layer(local: ModuleSpec, norm: type) -> ModuleSpec:
    """The spec of a layer with `norm` in place of every norm."""
    layer = local.submodules
    parts = _replaced(layer.self_attention.submodules, _OF_ATTENTION, norm)
    attention = replace(layer.self_attention, submodules=parts)
    return replace(local, submodules=replace(_replaced(layer, _OF_A_LAYER, norm), self_attention=attention))


def in_mtp(block: Any, norm: type) -> Any:
    """The spec of an MTP block with `norm` for the norms outside its transformer layers; None for None."""
    if block is None:
        return None
    layers = [replace(layer, submodules=_replaced(layer.submodules, _OF_MTP, norm)) for layer in block.layer_specs]
    return replace(block, layer_specs=layers)


def _replaced(parts: Any, names: tuple[str, ...], norm: type) -> Any:
    held = {name: getattr(parts, name, IdentityOp) for name in names}
    return replace(parts, **{name: norm for name, was in held.items() if was not in (None, IdentityOp)})
