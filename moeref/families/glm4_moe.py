"""GLM-4.5: GQA with QKV bias and optional qk-norm, a dense prefix, shared experts, sigmoid router with an fp32 bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import column, gated_mlp, qkv, replicated, row, vocab
from moeref.families.model import Model
from moeref.families.reading import check_switches, decoder, grouped_query, require, sigmoid_experts

NAME = "glm4_moe"
# Prefixes of a layer: in Megatron's decoder, in its MTP block, in Hugging Face files
L, M, H = "decoder.layers.{layer}.", "mtp.layers.{layer}.", "model.layers.{layer}."
MAPPINGS = (
    vocab(
        megatron="embedding.word_embeddings.weight",
        hf="model.embed_tokens.weight",
        mtp_copy=H + "embed_tokens.weight",
        where="first",
    ),
    # Attention
    replicated(
        megatron=L + "input_layernorm.weight",
        te_name=L + "self_attention.linear_qkv.layer_norm_weight",
        hf=H + "input_layernorm.weight",
        dims=("hidden",),
    ),
    qkv(
        megatron=L + "self_attention.linear_qkv.weight",
        q=H + "self_attn.q_proj.weight",
        k=H + "self_attn.k_proj.weight",
        v=H + "self_attn.v_proj.weight",
    ),
    qkv(
        megatron=L + "self_attention.linear_qkv.bias",
        q=H + "self_attn.q_proj.bias",
        k=H + "self_attn.k_proj.bias",
        v=H + "self_attn.v_proj.bias",
        only_if="qkv_bias",
    ),
    replicated(
        megatron=L + "self_attention.q_layernorm.weight",
        hf=H + "self_attn.q_norm.weight",
        dims=("head_dim",),
        only_if="qk_norm",
    ),
    replicated(
        megatron=L + "self_attention.k_layernorm.weight",
        hf=H + "self_attn.k_norm.weight",
        dims=("head_dim",),
        only_if="qk_norm",
    ),
    row(
        megatron=L + "self_attention.linear_proj.weight",
        hf=H + "self_attn.o_proj.weight",
        dims=("hidden", "q"),
    ),
    # Dense layers
    replicated(
        megatron=L + "pre_mlp_layernorm.weight",
        te_name=L + "mlp.linear_fc1.layer_norm_weight",
        hf=H + "post_attention_layernorm.weight",
        dims=("hidden",),
        where="dense",
    ),
    gated_mlp(
        megatron=L + "mlp.linear_fc1.weight",
        gate=H + "mlp.gate_proj.weight",
        up=H + "mlp.up_proj.weight",
        width="ffn",
        where="dense",
    ),
    row(
        megatron=L + "mlp.linear_fc2.weight",
        hf=H + "mlp.down_proj.weight",
        dims=("hidden", "ffn"),
        where="dense",
    ),
    # MoE layers
    replicated(
        megatron=L + "pre_mlp_layernorm.weight",
        hf=H + "post_attention_layernorm.weight",
        dims=("hidden",),
        where="moe",
    ),
    replicated(
        megatron=L + "mlp.router.weight",
        hf=H + "mlp.gate.weight",
        dims=("experts", "hidden"),
        where="moe",
    ),
    # A buffer, not a parameter. bf16 keeps 8 of its 238 distinct values (miles#811), so it stays fp32.
    replicated(
        megatron=L + "mlp.router.expert_bias",
        hf=H + "mlp.gate.e_score_correction_bias",
        dims=("experts",),
        where="moe",
        dtype="float32",
    ),
    gated_mlp(
        megatron=L + "mlp.shared_experts.linear_fc1.weight",
        gate=H + "mlp.shared_experts.gate_proj.weight",
        up=H + "mlp.shared_experts.up_proj.weight",
        width="shared_ffn",
        where="moe",
        only_if="shared_ffn",
    ),
    row(
        megatron=L + "mlp.shared_experts.linear_fc2.weight",
        hf=H + "mlp.shared_experts.down_proj.weight",
        dims=("hidden", "shared_ffn"),
        where="moe",
        only_if="shared_ffn",
    ),
    gated_mlp(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        gate=H + "mlp.experts.{expert}.gate_proj.weight",
        up=H + "mlp.experts.{expert}.up_proj.weight",
        fused=H + "mlp.experts.gate_up_proj",
        width="moe_ffn",
        where="moe",
    ),
    row(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        hf=H + "mlp.experts.{expert}.down_proj.weight",
        fused=H + "mlp.experts.down_proj",
        dims=("hidden", "moe_ffn"),
        where="moe",
    ),
    # Around the transformer layer of an MTP layer, whose own parameters are a decoder layer's
    replicated(megatron=M + "enorm.weight", hf=H + "enorm.weight", dims=("hidden",), where="mtp"),
    replicated(megatron=M + "hnorm.weight", hf=H + "hnorm.weight", dims=("hidden",), where="mtp"),
    # [embedding | hidden state] on both sides
    column(megatron=M + "eh_proj.weight", hf=H + "eh_proj.weight", dims=("hidden", "2hidden"), where="mtp"),
    replicated(
        megatron=M + "final_layernorm.weight",
        hf=H + "shared_head.norm.weight",
        dims=("hidden",),
        where="mtp",
    ),
    replicated(megatron="decoder.final_layernorm.weight", hf="model.norm.weight", dims=("hidden",), where="last"),
    vocab(
        megatron="output_layer.weight",
        hf="lm_head.weight",
        mtp_copy=H + "shared_head.head.weight",
        where="last",
    ),
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A GLM-4.5 `config.json` as a `Model`."""
    check_switches(hf, NAME, {"hidden_act": "silu", "norm_topk_prob": True})
    base, prefix = decoder(hf, NAME, dtype), require(hf, NAME, "first_k_dense_replace", default=1)
    return Model(
        **base,
        **grouped_query(hf, NAME, partial_rotary=0.5),
        **sigmoid_experts(hf, NAME),
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        moe_layers=tuple(i >= prefix for i in range(base["num_layers"])),
    )
