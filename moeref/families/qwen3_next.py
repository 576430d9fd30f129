"""Qwen3-Next: gated delta nets with gated attention in every few layers, a gated shared expert, zero-centred norms.

Norms scale by 1 + weight in transformers and, with `layernorm_zero_centered_gamma`, in megatron-core, so the weights
are the same bytes. The norm inside a gated delta net scales by its weight in both. Published files have one
multi-token prediction layer, with attention, under `mtp.`; their config does not say so, and without
`mtp_num_layers=1` it is left out, as in transformers. Sources: megatron-core's GatedDeltaNet, SelfAttention and
MultiTokenPredictionLayer, transformers' Qwen3NextGatedDeltaNet, and vLLM's Qwen3NextMultiTokenPredictor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import column, gated_mlp, gated_qkv, replicated, row, vocab
from moeref.families.mapping import HFPattern, ParamMapping
from moeref.families.model import FamilyError, GatedDeltaNet, Model, UnmappedModelError
from moeref.families.reading import check_switches, decoder, grouped_query, require

NAME = "qwen3_next"
# Prefixes of a layer: in Megatron's decoder, in its MTP block, in Hugging Face files
L, M, H = "decoder.layers.{layer}.", "mtp.layers.{layer}.", "model.layers.{layer}."
MAPPINGS = (
    vocab(megatron="embedding.word_embeddings.weight", hf="model.embed_tokens.weight", where="first"),
    # Layers with a gated delta net
    replicated(
        megatron=L + "input_layernorm.weight",
        te_name=L + "self_attention.in_proj.layer_norm_weight",
        hf=H + "input_layernorm.weight",
        dims=("hidden",),
        where="gated_delta_net",
    ),
    ParamMapping(
        megatron=L + "self_attention.in_proj.weight",
        hf=(
            HFPattern(H + "linear_attn.in_proj_qkvz.weight", ("gdn_qkvz", "hidden")),
            HFPattern(H + "linear_attn.in_proj_ba.weight", ("gdn_ba", "hidden")),
        ),
        sharding="gdn_in_proj",
        where="gated_delta_net",
    ),
    ParamMapping(
        megatron=L + "self_attention.conv1d.weight",
        hf=(HFPattern(H + "linear_attn.conv1d.weight", ("gdn_qkv", "one", "kernel")),),
        sharding="gdn_conv1d",
        where="gated_delta_net",
    ),
    column(
        megatron=L + "self_attention.dt_bias",
        hf=H + "linear_attn.dt_bias",
        dims=("value_heads",),
        where="gated_delta_net",
    ),
    column(
        megatron=L + "self_attention.A_log",
        hf=H + "linear_attn.A_log",
        dims=("value_heads",),
        where="gated_delta_net",
    ),
    replicated(
        megatron=L + "self_attention.out_norm.weight",
        hf=H + "linear_attn.norm.weight",
        dims=("value_dim",),
        where="gated_delta_net",
    ),
    row(
        megatron=L + "self_attention.out_proj.weight",
        hf=H + "linear_attn.out_proj.weight",
        dims=("hidden", "gdn_v"),
        where="gated_delta_net",
    ),
    # Layers with attention
    replicated(
        megatron=L + "input_layernorm.weight",
        te_name=L + "self_attention.linear_qkv.layer_norm_weight",
        hf=H + "input_layernorm.weight",
        dims=("hidden",),
        where="attention",
    ),
    gated_qkv(
        megatron=L + "self_attention.linear_qkv.weight",
        q=H + "self_attn.q_proj.weight",
        k=H + "self_attn.k_proj.weight",
        v=H + "self_attn.v_proj.weight",
        where="attention",
    ),
    replicated(
        megatron=L + "self_attention.q_layernorm.weight",
        hf=H + "self_attn.q_norm.weight",
        dims=("head_dim",),
        where="attention",
    ),
    replicated(
        megatron=L + "self_attention.k_layernorm.weight",
        hf=H + "self_attn.k_norm.weight",
        dims=("head_dim",),
        where="attention",
    ),
    row(
        megatron=L + "self_attention.linear_proj.weight",
        hf=H + "self_attn.o_proj.weight",
        dims=("hidden", "q"),
        where="attention",
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
        megatron=L + "mlp.shared_experts.linear_fc1.weight",
        gate=H + "mlp.shared_expert.gate_proj.weight",
        up=H + "mlp.shared_expert.up_proj.weight",
        width="shared_ffn",
        where="moe",
    ),
    row(
        megatron=L + "mlp.shared_experts.linear_fc2.weight",
        hf=H + "mlp.shared_expert.down_proj.weight",
        dims=("hidden", "shared_ffn"),
        where="moe",
    ),
    replicated(
        megatron=L + "mlp.shared_experts.gate_weight",
        hf=H + "mlp.shared_expert_gate.weight",
        dims=("one", "hidden"),
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
    # Around the transformer layer of an MTP layer, whose own parameters are those of a decoder layer with attention
    replicated(megatron=M + "enorm.weight", hf="mtp.pre_fc_norm_embedding.weight", dims=("hidden",), where="mtp"),
    replicated(megatron=M + "hnorm.weight", hf="mtp.pre_fc_norm_hidden.weight", dims=("hidden",), where="mtp"),
    # [embedding | hidden state] on both sides
    column(megatron=M + "eh_proj.weight", hf="mtp.fc.weight", dims=("hidden", "2hidden"), where="mtp"),
    replicated(megatron=M + "final_layernorm.weight", hf="mtp.norm.weight", dims=("hidden",), where="mtp"),
    replicated(megatron="decoder.final_layernorm.weight", hf="model.norm.weight", dims=("hidden",), where="last"),
    vocab(megatron="output_layer.weight", hf="lm_head.weight", where="last"),
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Qwen3-Next `config.json` as a `Model`, with an MTP layer if it says so."""
    return read_hybrid(hf, NAME, dtype, "num_nextn_predict_layers")


def read_hybrid(hf: Mapping[str, Any], name: str, dtype: str, mtp_key: str) -> Model:
    """A config with gated delta nets beside gated attention, as a `Model` of the family `name`.

    `mtp_key` of the config says how many MTP layers the model has. Files hold one, apart. Raises UnmappedModelError for
    more.
    """
    check_switches(hf, name, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    base = decoder(hf, name, dtype)
    layers, step, dense = base["num_layers"], hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    net = GatedDeltaNet(
        layers=_delta_layers(hf, name, layers),
        key_heads=require(hf, name, "linear_num_key_heads"),
        value_heads=require(hf, name, "linear_num_value_heads"),
        key_dim=require(hf, name, "linear_key_head_dim"),
        value_dim=require(hf, name, "linear_value_head_dim"),
        kernel=require(hf, name, "linear_conv_kernel_dim"),
    )
    if net.value_heads % net.key_heads:
        raise FamilyError(f"{name}: {net.value_heads} value heads do not divide over {net.key_heads} key heads")
    mtp_layers = int(hf.get(mtp_key) or 0)
    if mtp_layers > 1:
        raise UnmappedModelError(f"{name}: {mtp_key}={mtp_layers} is not mapped; published files have one")
    return Model(
        **base,
        **grouped_query(hf, name, partial_rotary=0.25),
        qk_norm=True,
        output_gate=True,
        zero_centered=True,
        gated_delta_net=net,
        experts=require(hf, name, "num_experts", "num_local_experts"),
        moe_ffn=require(hf, name, "moe_intermediate_size"),
        shared_ffn=require(hf, name, "shared_expert_intermediate_size"),
        shared_gate=True,
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        score_function="softmax",
        norm_topk_prob=bool(hf.get("norm_topk_prob", True)),
        mtp_apart=True,
    ).with_mtp(mtp_layers)


def _delta_layers(hf: Mapping[str, Any], name: str, layers: int) -> tuple[bool, ...]:
    """Which layers have a gated delta net: by `layer_types` or, in published configs, by `full_attention_interval`."""
    interval = hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise FamilyError(
            f"{name}: layer_types must say linear_attention or full_attention for each of {layers} layers, not {kinds}"
        )
    return tuple(kind == "linear_attention" for kind in kinds)
