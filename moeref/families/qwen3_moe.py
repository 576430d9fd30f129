"""Qwen3-MoE: GQA with qk-norm, no biases, softmax router, every layer MoE unless `mlp_only_layers` says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import gated_mlp, qkv, replicated, row, vocab
from moeref.families.model import Model
from moeref.families.reading import check_switches, decoder, require
from moeref.families.yarn import grouped_query_with_yarn

NAME = "qwen3_moe"
# Prefixes of a layer: in Megatron, in Hugging Face files
L, H = "decoder.layers.{layer}.", "model.layers.{layer}."
MAPPINGS = (
    vocab(megatron="embedding.word_embeddings.weight", hf="model.embed_tokens.weight", where="first"),
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
    replicated(
        megatron=L + "self_attention.q_layernorm.weight",
        hf=H + "self_attn.q_norm.weight",
        dims=("head_dim",),
    ),
    replicated(
        megatron=L + "self_attention.k_layernorm.weight",
        hf=H + "self_attn.k_norm.weight",
        dims=("head_dim",),
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
    replicated(megatron="decoder.final_layernorm.weight", hf="model.norm.weight", dims=("hidden",), where="last"),
    vocab(megatron="output_layer.weight", hf="lm_head.weight", where="last"),
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Qwen3-MoE `config.json` as a `Model`."""
    return read_as(hf, NAME, dtype)


def read_as(hf: Mapping[str, Any], name: str, dtype: str) -> Model:
    """A config with the keys of Qwen3-MoE, as a `Model` of the family `name`."""
    check_switches(hf, name, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    base = decoder(hf, name, dtype)
    step, dense = hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    return Model(
        **base,
        **grouped_query_with_yarn(hf, name),
        qk_norm=True,
        # Published configs say num_experts, transformers 5 saves num_local_experts.
        experts=require(hf, name, "num_experts", "num_local_experts"),
        moe_ffn=require(hf, name, "moe_intermediate_size"),
        # transformers: MoE where (layer + 1) % decoder_sparse_step == 0 and the layer is not in mlp_only_layers
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(base["num_layers"])),
        score_function="softmax",
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
    )
