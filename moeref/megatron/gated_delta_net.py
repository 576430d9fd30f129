"""Gated delta nets in plain torch, where megatron-core needs flash-linear-attention (FLA).

The net is megatron-core's own GatedDeltaNet in its deterministic form, which is plain torch except for one function of
FLA.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.megatron.norms import Norm


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x` divided by its L2 norm over the last dimension, as FLA's function of this name."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def replace_missing_fla() -> bool:
    """Give megatron-core's module the one function of FLA that it needs, if FLA is not installed; whether it is not.

    GatedDeltaNet requires the whole package when it is built, even in the deterministic form, which uses no kernel.
    """
    home: Any = sys.modules[gated_delta_net.torch_chunk_gated_delta_rule.__module__]
    if home.chunk_gated_delta_rule is None:
        home.HAVE_FLA, home.l2norm = True, l2norm
    return home.chunk_gated_delta_rule is None


def attention_only(config: Any) -> Any:
    """`config` for megatron-core's local block spec, which refuses gated delta nets."""
    if not config.experimental_attention_variant:
        return config
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


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
