"""MiniMax-M2: GQA with one norm over all heads of queries and one over all of keys, every layer MoE, a sigmoid router.

Files have `block_sparse_moe` with w1 (gate), w3 (up), w2 (down), as Mixtral's, and routers in fp32. Published configs
count multi-token prediction modules whose tensors are in no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import gated_mlp, qkv, replicated, row, vocab
from moeref.families.model import FamilyError, Model
from moeref.families.reading import check_switches, decoder, grouped_heads, grouped_query, require

NAME = "minimax_m2"
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
    # Whole on every TP rank
    replicated(megatron=L + "self_attention.q_layernorm.weight", hf=H + "self_attn.q_norm.weight", dims=("q",)),
    replicated(megatron=L + "self_attention.k_layernorm.weight", hf=H + "self_attn.k_norm.weight", dims=("kv",)),
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
        dtype="float32",
    ),
    replicated(
        megatron=L + "mlp.router.expert_bias",
        hf=H + "block_sparse_moe.e_score_correction_bias",
        fused=H + "mlp.e_score_correction_bias",
        dims=("experts",),
        where="moe",
        dtype="float32",
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
    """A MiniMax-M2 `config.json` as a `Model`."""
    switches: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "router_jitter_noise": 0.0}
    switches |= {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True}
    check_switches(hf, NAME, {**switches, "shared_intermediate_size": 0, "sliding_window": None})
    base = decoder(hf, NAME, dtype)
    if set(hf.get("attn_type_list") or [1]) != {1}:
        raise FamilyError(f"{NAME}: attn_type_list={hf['attn_type_list']}: only full attention (1) is mapped")
    return Model(
        **base,
        **_attention(hf),
        experts=require(hf, NAME, "num_local_experts", "num_experts"),
        moe_ffn=base["ffn"],
        moe_layers=(True,) * base["num_layers"],
        qk_norm=True,
        one_qk_norm=True,
        expert_bias=True,
        score_function="sigmoid",
        fp32_router=True,
        norm_topk_prob=True,
    )


def _attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention. Of each head `rotary_dim` channels turn, or `partial_rotary_factor` of them."""
    width, turned = grouped_heads(hf, NAME)["head_dim"], hf.get("rotary_dim")
    read = grouped_query(hf, NAME, partial_rotary=(turned or width) / width)
    if turned and not math.isclose(read["rotary_percent"] * width, turned):
        raise FamilyError(
            f"{NAME}: rotary_dim={turned}, and partial_rotary_factor={read['rotary_percent']} of heads of "
            f"{width}; which of them does the engine read?"
        )
    return read
