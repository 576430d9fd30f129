"""Multi-latent attention: its rows, and the reader of the configs that share DeepSeek-V3's table.

Down projections and latent norms are whole on every TP rank; up projections are split by heads, which lie in order.
Sources: megatron-core's MLASelfAttention and its Transformer Engine spec; the saved names of transformers' DeepseekV3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import common
from moeref.families.model import MLA, Model, ParamMapping, Tensor
from moeref.families.reading import check_switches, decoder, require, sigmoid_experts
from moeref.families.yarn import read_rope

_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_M, _A = _L + "self_attention.", _H + "self_attn."


def _latent_norm(part: str, only_if: str = "") -> ParamMapping:
    return ParamMapping(
        megatron=f"{_M}{part}_layernorm.weight",
        te_name=f"{_M}linear_{part}_up_proj.layer_norm_weight",
        hf=(Tensor(f"{_A}{part}_a_layernorm.weight", (f"{part}_rank",)),),
        only_if=only_if,
    )


ATTENTION = (
    ParamMapping(megatron=_L + "input_layernorm.weight", hf=(Tensor(_H + "input_layernorm.weight", ("hidden",)),)),
    ParamMapping(
        megatron=_M + "linear_q_proj.weight",
        hf=(Tensor(_A + "q_proj.weight", ("q", "hidden")),),
        sharding="column",
        only_if="direct_q",
    ),
    ParamMapping(
        megatron=_M + "linear_q_down_proj.weight",
        hf=(Tensor(_A + "q_a_proj.weight", ("q_rank", "hidden")),),
        only_if="latent_q",
    ),
    _latent_norm("q", only_if="latent_q"),
    ParamMapping(
        megatron=_M + "linear_q_up_proj.weight",
        hf=(Tensor(_A + "q_b_proj.weight", ("q", "q_rank")),),
        sharding="column",
        only_if="latent_q",
    ),
    ParamMapping(
        megatron=_M + "linear_kv_down_proj.weight",
        hf=(Tensor(_A + "kv_a_proj_with_mqa.weight", ("kv_rank+rope", "hidden")),),
    ),
    _latent_norm("kv"),
    ParamMapping(
        megatron=_M + "linear_kv_up_proj.weight",
        hf=(Tensor(_A + "kv_b_proj.weight", ("kv", "kv_rank")),),
        sharding="column",
    ),
    ParamMapping(
        megatron=_M + "linear_proj.weight",
        hf=(Tensor(_A + "o_proj.weight", ("hidden", "v")),),
        sharding="row",
    ),
)
MAPPINGS = (
    common.EMBEDDING,
    *ATTENTION,
    *common.DENSE,
    *common.ROUTER,
    *common.SHARED,
    *common.EXPERTS,
    *common.MTP,
    *common.HEAD,
)
_SWITCHES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def read_mla(hf: Mapping[str, Any], name: str, dtype: str, moe_layers: tuple[bool, ...]) -> Model:
    """A config with DeepSeek-V3's keys as a `Model`.

    The latent norms take `rms_norm_eps` in megatron-core and in inference engines; transformers has 1e-6 there whatever
    the config says, which is the same for DeepSeek-V3 but not for GLM-4.7-Flash (1e-5).
    """
    check_switches(hf, name, {**_SWITCHES, "num_key_value_heads": require(hf, name, "num_attention_heads")})
    base = decoder(hf, name, dtype)
    theta, yarn = read_rope(hf, name)
    mla = MLA(
        q_rank=hf.get("q_lora_rank") or 0,
        kv_rank=require(hf, name, "kv_lora_rank"),
        nope=require(hf, name, "qk_nope_head_dim"),
        rope=require(hf, name, "qk_rope_head_dim"),
        v=require(hf, name, "v_head_dim"),
        yarn=yarn,
    )
    return Model(
        **base,
        **sigmoid_experts(hf, name),
        kv_groups=base["heads"],
        head_dim=mla.v,
        qk_norm=True,
        rope_theta=theta,
        moe_layers=moe_layers,
        mla=mla,
    )
