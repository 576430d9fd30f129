"""Gated delta nets in plain torch, where megatron-core needs flash-linear-attention (FLA).

The net is megatron-core's own GatedDeltaNet. Of FLA it calls three functions, which are here by their names.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.megatron.norms import Norm


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x` divided by its L2 norm over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """The convolution of each channel of `x` [B, S, D] with its `weight` [D, W], and SiLU, as megatron-core calls it.

    Positions before the first are 0. Of packed samples, which `cu_seqlens` cuts S into, each begins anew. The W terms
    of a sum are added in fp32 and in order; in torch's `conv1d` that order depends on S.
    """
    width, done = weight.shape[1], []
    for part_BSD in _parts(x.float(), cu_seqlens):
        before_BSD = torch.nn.functional.pad(part_BSD, (0, 0, width - 1, 0))
        terms = [before_BSD[:, at : at + part_BSD.shape[1]] * weight[:, at].float() for at in range(width)]
        done.append(sum(terms[1:], terms[0]))
    summed_BSD = torch.cat(done, 1)
    return torch.nn.functional.silu(summed_BSD if bias is None else summed_BSD + bias.float()).to(x.dtype), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule as megatron-core has it in plain torch, of each packed sample by itself; all [B, S, ...]."""
    rule = gated_delta_net.torch_chunk_gated_delta_rule
    parts = zip(*(_parts(of, cu_seqlens) for of in (q, k, v, g, beta)), strict=True)
    return torch.cat([rule(*part[:3], g=part[3], beta=part[4], **given)[0] for part in parts], 1), None


def _parts(of_BS: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """What each packed sample has of a tensor [B, S, ...]; the whole without any."""
    ends = [0, of_BS.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    yield from (of_BS[:, begin:end] for begin, end in itertools.pairwise(ends))


def _replace_missing_fla() -> None:
    """Give megatron-core's modules what they call of FLA, if FLA is not installed."""
    own = {"l2norm": l2norm, "causal_conv1d": causal_conv1d, "chunk_gated_delta_rule": chunk_gated_delta_rule}
    home: Any = sys.modules[gated_delta_net.torch_chunk_gated_delta_rule.__module__]
    if home.chunk_gated_delta_rule is None:
        home.HAVE_FLA = True
        for module in (home, sys.modules[gated_delta_net.GatedDeltaNet.__module__]):
            vars(module).update(own)


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
    _replace_missing_fla()
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
