"""Qwen3-Next: gated delta nets with gated attention in every few layers, a gated shared expert, zero-centred norms.

Norms scale by 1 + weight in transformers and, with `layernorm_zero_centered_gamma`, in megatron-core: the weights are
the same bytes. The gated delta net's own norm scales by its weight, in both. Multi-token prediction (`mtp.*` in
published files) is left out, as transformers leaves it out. Sources: megatron-core's GatedDeltaNet and SelfAttention,
and transformers' Qwen3NextGatedDeltaNet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import common
from moeref.families.model import FamilyError, GatedDeltaNet, Model, ParamMapping, Tensor
from moeref.families.reading import check_switches, decoder, grouped_query, require

NAME = "qwen3_next"
_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_M, _A = _L + "self_attention.", _H + "linear_attn."

_INPUT_NORM, _QKV, _, *_REST = common.ATTENTION
_Q, *_KV = _QKV.hf
ATTENTION = tuple(
    replace(mapping, where="attention")
    for mapping in (
        _INPUT_NORM,
        replace(_QKV, hf=(replace(_Q, dims=("2q", "hidden")), *_KV), sharding="gated_qkv"),
        *_REST,
    )
)
DELTA = tuple(
    replace(mapping, where="gated_delta_net")
    for mapping in (
        replace(_INPUT_NORM, te_name=_M + "in_proj.layer_norm_weight"),
        ParamMapping(
            megatron=_M + "in_proj.weight",
            hf=(
                Tensor(_A + "in_proj_qkvz.weight", ("gdn_qkvz", "hidden")),
                Tensor(_A + "in_proj_ba.weight", ("gdn_ba", "hidden")),
            ),
            sharding="gdn_in_proj",
        ),
        ParamMapping(
            megatron=_M + "conv1d.weight",
            hf=(Tensor(_A + "conv1d.weight", ("gdn_qkv", "one", "kernel")),),
            sharding="gdn_conv1d",
        ),
        ParamMapping(megatron=_M + "dt_bias", hf=(Tensor(_A + "dt_bias", ("value_heads",)),), sharding="column"),
        ParamMapping(megatron=_M + "A_log", hf=(Tensor(_A + "A_log", ("value_heads",)),), sharding="column"),
        ParamMapping(megatron=_M + "out_norm.weight", hf=(Tensor(_A + "norm.weight", ("value_dim",)),)),
        ParamMapping(
            megatron=_M + "out_proj.weight",
            hf=(Tensor(_A + "out_proj.weight", ("hidden", "gdn_v")),),
            sharding="row",
        ),
    )
)
SHARED = (
    *common.mlp(_L + "mlp.shared_experts.", _H + "mlp.shared_expert.", "shared_ffn", "moe"),
    ParamMapping(
        megatron=_L + "mlp.shared_experts.gate_weight",
        hf=(Tensor(_H + "mlp.shared_expert_gate.weight", ("one", "hidden")),),
        where="moe",
    ),
)
MAPPINGS = (
    common.EMBEDDING,
    *DELTA,
    *ATTENTION,
    *common.DENSE,
    common.PRE_MOE_NORM,
    common.GATE,
    *SHARED,
    *common.EXPERTS,
    *common.HEAD,
)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A Qwen3-Next `config.json` as a `Model`."""
    check_switches(hf, NAME, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    base = decoder(hf, NAME, dtype)
    layers, step, dense = base["num_layers"], hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    net = GatedDeltaNet(
        layers=_delta_layers(hf, layers),
        key_heads=require(hf, NAME, "linear_num_key_heads"),
        value_heads=require(hf, NAME, "linear_num_value_heads"),
        key_dim=require(hf, NAME, "linear_key_head_dim"),
        value_dim=require(hf, NAME, "linear_value_head_dim"),
        kernel=require(hf, NAME, "linear_conv_kernel_dim"),
    )
    if net.value_heads % net.key_heads:
        raise FamilyError(f"{NAME}: {net.value_heads} value heads do not divide over {net.key_heads} key heads")
    return Model(
        **base,
        **grouped_query(hf, NAME, partial_rotary=0.25),
        qk_norm=True,
        output_gate=True,
        zero_centered=True,
        gated_delta_net=net,
        experts=require(hf, NAME, "num_experts", "num_local_experts"),
        moe_ffn=require(hf, NAME, "moe_intermediate_size"),
        shared_ffn=require(hf, NAME, "shared_expert_intermediate_size"),
        shared_gate=True,
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        score_function="softmax",
        norm_topk_prob=bool(hf.get("norm_topk_prob", True)),
        ignored=("mtp.",),
    )


def _delta_layers(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """By `layer_types` or, in published configs, `full_attention_interval`."""
    interval = hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise FamilyError(
            f"{NAME}: layer_types must say linear_attention or full_attention for each of {layers} layers, not {kinds}"
        )
    return tuple(kind == "linear_attention" for kind in kinds)
