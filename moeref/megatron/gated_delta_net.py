"""Gated delta nets and zero-centred norms in plain torch: what megatron-core leaves to FLA and Transformer Engine.

megatron-core's own GatedDeltaNet runs, in its deterministic form, whose kernels are plain torch but for one function of
flash-linear-attention. Its local norm does not know `layernorm_zero_centered_gamma`.
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
from moeref.megatron.spec import LayerNormColumnParallelLinear


class Norm(torch.nn.Module):
    """RMSNorm in fp32 that scales by `weight`, or by 1 + `weight` with `zero_centered`. Unset until loaded."""

    zero_centered = False

    def __init__(self, config: Any, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        mark_sequence_parallel(self.weight, config.sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normalised input, in its own dtype."""
        scale = self.weight.float() + 1.0 if self.zero_centered else self.weight.float()
        return torch.nn.functional.rms_norm(hidden.float(), scale.shape, scale, self.eps).type_as(hidden)


class ZeroCenteredNorm(Norm):
    """RMSNorm that scales by 1 + `weight`, as transformers' Qwen3NextRMSNorm."""

    zero_centered = True


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x` over the length of its last dimension; flash-linear-attention's function of this name."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def without_fla() -> bool:
    """Whether flash-linear-attention is not installed; then GatedDeltaNet is given its one missing function.

    The module asks for the whole package before it is built, also for the deterministic form that needs no kernel.
    """
    home: Any = sys.modules[gated_delta_net.torch_chunk_gated_delta_rule.__module__]
    if home.chunk_gated_delta_rule is None:
        home.HAVE_FLA, home.l2norm = True, l2norm
    return home.chunk_gated_delta_rule is None


def attention_only(config: Any) -> Any:
    """`config` for megatron-core's local block spec, which refuses gated delta nets: `adapted` puts them in."""
    if not config.experimental_attention_variant:
        return config
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def adapted(layers: Sequence[ModuleSpec], is_delta: Sequence[bool], *, fused: bool) -> list[ModuleSpec]:
    """Layers of `spec.layer_spec` with zero-centred norms and, where `is_delta`, a gated delta net for attention."""
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
    """Layers as they are but, where `is_delta`, for a gated delta net of these linears for attention."""
    net = _net(in_proj, out_proj)
    return [
        replace(layer, submodules=replace(layer.submodules, self_attention=net)) if delta else layer
        for layer, delta in zip(layers, is_delta, strict=True)
    ]


def _net(in_proj: type, out_proj: type) -> ModuleSpec:
    # Its own norm is not zero-centred in the files. A zero-centred one, as Transformer Engine's spec builds it, would
    # hold w - 1, which rounds where |w| < 0.5.
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=in_proj,
        out_norm=Norm,
        out_proj=out_proj,
    )
    return ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=parts)
