"""Layer specs of plain torch modules, optionally with the parameter names of Transformer Engine's spec.

megatron-core's `ModuleSpec` takes any module, so Transformer Engine's names are possible without it, such as
`linear_qkv.layer_norm_weight` instead of `input_layernorm.weight`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.megatron import norms, sparse_attention
from moeref.megatron.attention import CausalAttention, GroupedQueryAttention, LatentAttention
from moeref.megatron.marks import mark_sequence_parallel


class LayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A ColumnParallelLinear that applies RMSNorm to its input; the weight is `layer_norm_weight`, as in TE."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones_like(self.weight[0]))
        mark_sequence_parallel(self.layer_norm_weight, self.config.sequence_parallel)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The output of ColumnParallelLinear for the normalised input."""
        eps, scale = self.config.layernorm_epsilon, self.layer_norm_weight
        if self.config.layernorm_zero_centered_gamma:
            normed = norms.rms_norm(hidden, scale, eps, zero_centered=True)
        else:  # in the dtype of `hidden`, as TorchNorm
            normed = torch.nn.functional.rms_norm(hidden, scale.shape, scale, eps)
        return super().forward(normed, *args, **kwargs)


class _FusedNorms(LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local modules, with norms fused into the linears."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear


def layer_spec(local: ModuleSpec, *, moe: bool, mla: bool, fused: bool, norm: type, dsa: bool) -> ModuleSpec:
    """A layer of megatron-core's local spec with MLA in plain torch and, if `fused`, norms inside the linears that
    follow them.

    An MoE layer keeps `pre_mlp_layernorm`, because a router and experts follow it. MLA keeps `input_layernorm`, because
    two linears follow it.
    """
    local = norms.in_layer(local, norm)
    layer = local.submodules
    attention = (_latent if mla else _grouped_query)(layer.self_attention, fused and not dsa)
    if dsa:  # its indexer reads normalised latents, so their norms stay apart
        parts = replace(attention.submodules, core_attention=sparse_attention.core_attention())
        attention = replace(attention, submodules=parts)
    layer = replace(layer, self_attention=attention)
    if fused and not mla:
        layer = replace(layer, input_layernorm=IdentityOp)
    if fused:  # parameters have Transformer Engine's names already, and an MoE layer keeps pre_mlp_layernorm
        layer = replace(layer, sharded_state_dict_keys_map={})
    if fused and not moe:
        mlp = get_mlp_module_spec_for_backend(backend=_FusedNorms(), num_experts=None)
        layer = replace(layer, pre_mlp_layernorm=IdentityOp, mlp=mlp)
    return replace(local, submodules=layer)


def _grouped_query(local: ModuleSpec, fused: bool) -> ModuleSpec:
    parts = replace(local.submodules, core_attention=GroupedQueryAttention)
    if fused:
        parts = replace(parts, linear_qkv=LayerNormColumnParallelLinear)
    return replace(local, submodules=parts)


def _latent(local: ModuleSpec, fused: bool) -> ModuleSpec:
    up = LayerNormColumnParallelLinear if fused else ColumnParallelLinear
    parts = replace(local.submodules, core_attention=CausalAttention, linear_q_up_proj=up, linear_kv_up_proj=up)
    if fused:
        parts = replace(parts, q_layernorm=IdentityOp, kv_layernorm=IdentityOp)
    return replace(local, module=LatentAttention, submodules=parts)


def mtp_spec(config: Any, *, moe: bool, mla: bool, fused: bool, norm: type, dsa: bool, vp_stage: int | None) -> Any:
    """The spec of a block of MTP layers, each with a `layer_spec` inside."""
    local = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=mla,
        normalization="RMSNorm",
    )
    inner = layer_spec(local, moe=moe, mla=mla, fused=fused, norm=norm, dsa=dsa)
    return norms.in_mtp(get_gpt_mtp_block_spec(config, inner, use_transformer_engine=False, vp_stage=vp_stage), norm)


def mtp_name() -> Literal["mtp_model_layer", "transformer_layer"]:
    """The name of the transformer layer inside an MTP layer in the installed megatron-core."""
    known = {field.name for field in fields(MultiTokenPredictionLayerSubmodules)}
    return "mtp_model_layer" if "mtp_model_layer" in known else "transformer_layer"
