"""DeepSeek-V3 (also V3.1, R1, Moonlight): MLA, a dense prefix, shared experts, sigmoid router limited to expert groups.

Multi-token prediction layers are included. The published files are FP8 in blocks, which loading turns into bf16.
Sources: megatron-core's MLASelfAttention and its Transformer Engine spec; the saved names of transformers' DeepseekV3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import column, gated_mlp, replicated, row, vocab
from moeref.families.mla import read_mla
from moeref.families.model import Model
from moeref.families.reading import require

NAME = "deepseek_v3"
#: Other `model_type`s whose config and tensors are the same.
ALIASES = ("kimi_k2",)
# Prefixes of a layer: in Megatron's decoder, in its MTP block, in Hugging Face files
L, M, H = "decoder.layers.{layer}.", "mtp.layers.{layer}.", "model.layers.{layer}."
MAPPINGS = (
    vocab(
        megatron="embedding.word_embeddings.weight",
        hf="model.embed_tokens.weight",
        mtp_copy=H + "embed_tokens.weight",
        where="first",
    ),
    # Multi-latent attention: down projections and latent norms are whole on every TP rank, up projections are split by
    # heads, which lie in order. Without `q_lora_rank` queries have no latent.
    replicated(megatron=L + "input_layernorm.weight", hf=H + "input_layernorm.weight", dims=("hidden",)),
    column(
        megatron=L + "self_attention.linear_q_proj.weight",
        hf=H + "self_attn.q_proj.weight",
        dims=("q", "hidden"),
        only_if="direct_q",
    ),
    replicated(
        megatron=L + "self_attention.linear_q_down_proj.weight",
        hf=H + "self_attn.q_a_proj.weight",
        dims=("q_rank", "hidden"),
        only_if="latent_q",
    ),
    replicated(
        megatron=L + "self_attention.q_layernorm.weight",
        te_name=L + "self_attention.linear_q_up_proj.layer_norm_weight",
        hf=H + "self_attn.q_a_layernorm.weight",
        dims=("q_rank",),
        only_if="latent_q",
    ),
    column(
        megatron=L + "self_attention.linear_q_up_proj.weight",
        hf=H + "self_attn.q_b_proj.weight",
        dims=("q", "q_rank"),
        only_if="latent_q",
    ),
    replicated(
        megatron=L + "self_attention.linear_kv_down_proj.weight",
        hf=H + "self_attn.kv_a_proj_with_mqa.weight",
        dims=("kv_rank+rope", "hidden"),
    ),
    replicated(
        megatron=L + "self_attention.kv_layernorm.weight",
        te_name=L + "self_attention.linear_kv_up_proj.layer_norm_weight",
        hf=H + "self_attn.kv_a_layernorm.weight",
        dims=("kv_rank",),
    ),
    column(
        megatron=L + "self_attention.linear_kv_up_proj.weight",
        hf=H + "self_attn.kv_b_proj.weight",
        dims=("kv", "kv_rank"),
    ),
    row(
        megatron=L + "self_attention.linear_proj.weight",
        hf=H + "self_attn.o_proj.weight",
        dims=("hidden", "v"),
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
    """A DeepSeek-V3 `config.json` as a `Model`; without `q_lora_rank` (Moonlight) queries have no latent."""
    return read_as(hf, NAME, dtype)


def read_as(hf: Mapping[str, Any], name: str, dtype: str) -> Model:
    """The same for a family of another `name`."""
    layers, prefix = require(hf, name, "num_hidden_layers"), require(hf, name, "first_k_dense_replace", default=3)
    return read_mla(hf, name, dtype, tuple(i >= prefix for i in range(layers)))
