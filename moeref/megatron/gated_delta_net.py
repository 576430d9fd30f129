"""Gated delta nets and zero-centred norms in plain torch, where megatron-core needs FLA and Transformer Engine.

The net is megatron-core's own GatedDeltaNet in its deterministic form, which is plain torch except for one function of
flash-linear-attention (FLA). megatron-core's local norm ignores `layernorm_zero_centered_gamma`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.megatron.marks import mark_sequence_parallel
from moeref.megatron.norms import rms_norm
from moeref.megatron.spec import LayerNormColumnParallelLinear


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


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x` divided by its L2 norm over the last dimension, as FLA's function of this name."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def without_fla() -> bool:
    """Whether flash-linear-attention is not installed. If so, give megatron-core's module the one function it needs.

    GatedDeltaNet requires the whole package when it is built, even in the deterministic form, which uses no kernel.
    """
    home: Any = sys.modules[gated_delta_net.torch_chunk_gated_delta_rule.__module__]
    if home.chunk_gated_delta_rule is None:
        home.HAVE_FLA, home.l2norm = True, l2norm
    return home.chunk_gated_delta_rule is None


def attention_only(config: Any) -> Any:
    """`config` for megatron-core's local block spec, which refuses gated delta nets; `adapted` adds them."""
    if not config.experimental_attention_variant:
        return config
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def adapted(layers: Sequence[ModuleSpec], is_delta: Sequence[bool], *, fused: bool) -> list[ModuleSpec]:
    """Layers of `spec.layer_spec` with zero-centred norms and, where `is_delta`, a gated delta net as attention."""
    return [_adapted(layer, delta, fused) for layer, delta in zip(layers, is_delta, strict=True)]


def _adapted(local: ModuleSpec, delta: bool, fused: bool) -> ModuleSpec:
    layer = local.submodules
    norms = {
        name: ZeroCenteredNorm
        for name in ("input_layernorm", "pre_mlp_layernorm")
        if getattr(layer, name) is not IdentityOp
    }
    parts = replace(layer.self_attention.submodules, q_layernorm=ZeroCenteredNorm, k_layernorm=ZeroCenteredNorm)
    attention = replace(layer.self_attention, submodules=parts)
    linears = LayerNormColumnParallelLinear if fused else ColumnParallelLinear, RowParallelLinear
    return replace(local, submodules=replace(layer, **norms, self_attention=_net(*linears) if delta else attention))


def in_place_of_attention(
    layers: Sequence[ModuleSpec], is_delta: Sequence[bool], in_proj: type, out_proj: type
) -> list[ModuleSpec]:
    """`layers` with a gated delta net, made of these linears, as attention where `is_delta`."""
    net = _net(in_proj, out_proj)
    return [
        replace(layer, submodules=replace(layer.submodules, self_attention=net)) if delta else layer
        for layer, delta in zip(layers, is_delta, strict=True)
    ]


def _net(in_proj: type, out_proj: type) -> ModuleSpec:
    # The weight w of the inner norm is not zero-centred in checkpoints. A zero-centred norm, as in Transformer Engine's
    # spec, would hold w - 1, which rounds where |w| < 0.5.
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=in_proj,
        out_norm=Norm,
        out_proj=out_proj,
    )
    return ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=parts)
