"""RMSNorm of torch as a module of megatron-core's local spec, and one over all heads of a token.

megatron-core's wrapper of it refuses sequence parallelism and ignores `layernorm_zero_centered_gamma`. Its local spec
uses apex's norm if apex is installed, which has no RMSNorm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
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


class _OverAllHeads(torch.nn.Module):
    """RMSNorm of all heads of a token together, of which this TP rank has some; megatron-core has one for each head.

    Every rank holds the whole weight, whose gradients megatron-core sums over TP by its name, `q_layernorm` or
    `k_layernorm`. Where ranks share a KV head each counts as often as the others.
    """

    heads: str  # the field of the config that counts them

    def __init__(self, config: Any, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(getattr(config, self.heads) * hidden_size))
        self.tp_group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp

    def forward(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        """The normalised heads of this rank [..., heads / TP, head_dim], in their dtype; in fp32 before the scale."""
        weight_HD = self.weight.view(-1, x_SBHD.shape[-1])
        rank, size = self.tp_group.rank(), self.tp_group.size()
        first = rank * len(weight_HD) // size
        squares_SB11 = x_SBHD.float().square().mean((-2, -1), keepdim=True)
        if size > 1:  # each rank's heads depend on the squares of all
            summed = reduce_from_tensor_model_parallel_region(squares_SB11, group=self.tp_group)
            squares_SB11 = copy_to_tensor_model_parallel_region(summed, group=self.tp_group) / size
        normed_SBHD = (x_SBHD.float() * torch.rsqrt(squares_SB11 + self.eps)).type_as(x_SBHD)
        return normed_SBHD * weight_HD[first : first + x_SBHD.shape[-2]]


class OverQueries(_OverAllHeads):
    """The norm of queries."""

    heads = "num_attention_heads"


class OverKeys(_OverAllHeads):
    """The norm of keys."""

    heads = "num_query_groups"


def over_all_heads(layer: ModuleSpec) -> ModuleSpec:
    """The spec of a layer with one norm over all heads of queries and one over all of keys."""
    attention = layer.submodules.self_attention
    parts = replace(attention.submodules, q_layernorm=OverQueries, k_layernorm=OverKeys)
    return replace(layer, submodules=replace(layer.submodules, self_attention=replace(attention, submodules=parts)))


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
