"""Mixtral: GQA without qk-norm or biases, every layer MoE, softmax over the chosen experts.

Files have `block_sparse_moe` with w1 (gate), w3 (up), w2 (down); in memory transformers 5 has `mlp`, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import gated_mlp, qkv, replicated, row, vocab
from moeref.families.model import Model
from moeref.families.reading import check_switches, decoder, grouped_query, require

NAME = "mixtral"
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
    row(
        megatron=L + "self_attention.linear_proj.weight",
        hf=H + "self_attn.o_proj.weight",
        dims=("hidden", "q"),
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
        hf=H + "block_sparse_moe.gate.weight",
        fused=H + "mlp.gate.weight",
        dims=("experts", "hidden"),
        where="moe",
    ),
    gated_mlp(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        gate=H + "block_sparse_moe.experts.{expert}.w1.weight",
        up=H + "block_sparse_moe.experts.{expert}.w3.weight",
        fused=H + "mlp.experts.gate_up_proj",
        width="moe_ffn",
        where="moe",
    ),
    row(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        hf=H + "block_sparse_moe.experts.{expert}.w2.weight",
        fused=H + "mlp.experts.down_proj",
        dims=("hidden", "moe_ffn"),
        where="moe",
    ),
    replicated(megatron="decoder.final_layernorm.weight", hf="model.norm.weight", dims=("hidden",), where="last"),
    vocab(megatron="output_layer.weight", hf="lm_head.weight", where="last"),
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Mixtral `config.json` as a `Model`."""
    check_switches(
        hf,
        NAME,
        {"hidden_act": "silu", "attention_bias": False, "sliding_window": None, "router_jitter_noise": 0.0},
    )
    base = decoder(hf, NAME, dtype)
    return Model(
        **base,
        **grouped_query(hf, NAME),
        experts=require(hf, NAME, "num_local_experts"),
        moe_ffn=base["ffn"],
        moe_layers=(True,) * base["num_layers"],
        score_function="softmax",
        norm_topk_prob=True,
    )
