"""gpt-oss: GQA with sinks and a sliding window in every other layer, biases everywhere, every layer MoE.

Files hold all experts of a layer in one tensor per parameter, as [in, out], with gate and up alternating; so does
transformers in memory. The published files have experts in MXFP4, which loading makes bf16.
Sources: the saved names of transformers' GptOss; megatron-core's DotProductAttention (`softmax_offset`) and Router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.constructors import column, qkv, replicated, row, vocab
from moeref.families.mapping import HFPattern, ParamMapping
from moeref.families.model import FamilyError, Model, Window
from moeref.families.reading import check_switches, decoder, require
from moeref.families.yarn import GROUPED, read_rope

NAME = "gpt_oss"
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
    qkv(
        megatron=L + "self_attention.linear_qkv.bias",
        q=H + "self_attn.q_proj.bias",
        k=H + "self_attn.k_proj.bias",
        v=H + "self_attn.v_proj.bias",
    ),
    row(
        megatron=L + "self_attention.linear_proj.weight",
        hf=H + "self_attn.o_proj.weight",
        dims=("hidden", "q"),
    ),
    replicated(
        megatron=L + "self_attention.linear_proj.bias",
        hf=H + "self_attn.o_proj.bias",
        dims=("hidden",),
    ),
    column(
        megatron=L + "self_attention.core_attention.softmax_offset",
        hf=H + "self_attn.sinks",
        dims=("heads",),
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
        hf=H + "mlp.router.weight",
        dims=("experts", "hidden"),
        where="moe",
    ),
    replicated(megatron=L + "mlp.router.bias", hf=H + "mlp.router.bias", dims=("experts",), where="moe"),
    ParamMapping(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        hf=(
            HFPattern(
                H + "mlp.experts.gate_up_proj",
                ("experts", "hidden", "2moe_ffn"),
                transposed=True,
                interleaved=True,
            ),
        ),
        sharding="gate_up",
        where="moe",
    ),
    ParamMapping(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc1.bias",
        hf=(HFPattern(H + "mlp.experts.gate_up_proj_bias", ("experts", "2moe_ffn"), interleaved=True),),
        sharding="gate_up",
        where="moe",
    ),
    ParamMapping(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        hf=(HFPattern(H + "mlp.experts.down_proj", ("experts", "moe_ffn", "hidden"), transposed=True),),
        sharding="row",
        where="moe",
    ),
    # The bias of a row-parallel linear is whole on every rank.
    replicated(
        megatron=L + "mlp.experts.local_experts.{expert}.linear_fc2.bias",
        hf=H + "mlp.experts.down_proj_bias",
        dims=("experts", "hidden"),
        where="moe",
    ),
    replicated(megatron="decoder.final_layernorm.weight", hf="model.norm.weight", dims=("hidden",), where="last"),
    vocab(megatron="output_layer.weight", hf="lm_head.weight", where="last"),
)
#: transformers always uses this limit.
_LIMIT = 7.0


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A gpt-oss `config.json` as a `Model`; without `layer_types` layers 0, 2, 4, … have the window."""
    check_switches(hf, NAME, {"hidden_act": "silu", "attention_bias": True, "swiglu_limit": _LIMIT})
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        raise FamilyError(f"{NAME}: config.json has no rope_parameters or rope_scaling; transformers assumes YaRN then")
    base = decoder(hf, NAME, dtype)
    theta, yarn = read_rope(hf, NAME, GROUPED)
    return Model(
        **base,
        kv_groups=require(hf, NAME, "num_key_value_heads"),
        head_dim=require(hf, NAME, "head_dim"),
        rope_theta=theta,
        yarn=yarn,
        qkv_bias=True,
        linear_bias=True,
        sinks=True,
        window=_window(hf, base["num_layers"]),
        experts=require(hf, NAME, "num_local_experts"),
        moe_ffn=base["ffn"],
        moe_layers=(True,) * base["num_layers"],
        clamp=_LIMIT,
        score_function="softmax",
        norm_topk_prob=True,
    )


def _window(hf: Mapping[str, Any], layers: int) -> Window | None:
    kinds = hf.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise FamilyError(
            f"{NAME}: layer_types must say sliding_attention or full_attention for each of {layers} layers, not {kinds}"
        )
    if "sliding_attention" not in kinds:
        return None
    return Window(require(hf, NAME, "sliding_window"), tuple(kind == "sliding_attention" for kind in kinds))
