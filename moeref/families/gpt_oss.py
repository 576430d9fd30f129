"""gpt-oss: GQA with sinks and a sliding window in every other layer, biases everywhere, every layer MoE.

Files hold the experts of a layer in one tensor each, as [in, out], with gate and up alternating, and spell nothing
otherwise in memory. The published ones are MXFP4 and have to be turned into bf16 first.
Sources: the saved names of transformers' GptOss; megatron-core's DotProductAttention (`softmax_offset`) and Router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import common
from moeref.families.model import FamilyError, Model, ParamMapping, Sharding, Tensor, Window
from moeref.families.reading import check_switches, decoder, require
from moeref.families.yarn import read_rope

NAME = "gpt_oss"
_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_E = _H + "mlp.experts."


def _expert(parameter: str, hf: Tensor, sharding: Sharding = "replicate") -> ParamMapping:
    """The row of an expert's `linear_fc{1,2}.{weight,bias}`."""
    return ParamMapping(
        megatron=f"{_L}mlp.experts.local_experts.{{expert}}.{parameter}",
        grouped_name=f"{_L}mlp.experts.{parameter}{{expert}}",
        hf=(hf,),
        sharding=sharding,
        where="moe",
    )


EXPERTS = (
    _expert(
        "linear_fc1.weight",
        Tensor(_E + "gate_up_proj", ("experts", "hidden", "2moe_ffn"), transposed=True, interleaved=True),
        "gate_up",
    ),
    _expert("linear_fc1.bias", Tensor(_E + "gate_up_proj_bias", ("experts", "2moe_ffn"), interleaved=True), "gate_up"),
    _expert("linear_fc2.weight", Tensor(_E + "down_proj", ("experts", "moe_ffn", "hidden"), transposed=True), "row"),
    # Row-parallel linears hold their bias whole.
    _expert("linear_fc2.bias", Tensor(_E + "down_proj_bias", ("experts", "hidden"))),
)
MAPPINGS = (
    common.EMBEDDING,
    *common.ATTENTION,
    ParamMapping(
        megatron=_L + "self_attention.linear_proj.bias", hf=(Tensor(_H + "self_attn.o_proj.bias", ("hidden",)),)
    ),
    ParamMapping(
        megatron=_L + "self_attention.core_attention.softmax_offset",
        hf=(Tensor(_H + "self_attn.sinks", ("heads",)),),
        sharding="column",
    ),
    common.PRE_MOE_NORM,
    replace(common.GATE, hf=(Tensor(_H + "mlp.router.weight", ("experts", "hidden")),)),
    ParamMapping(megatron=_L + "mlp.router.bias", hf=(Tensor(_H + "mlp.router.bias", ("experts",)),), where="moe"),
    *EXPERTS,
    *common.HEAD,
)
_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
#: transformers has this limit whatever the config says.
_LIMIT = 7.0


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A gpt-oss `config.json` as a `Model`; without `layer_types` the first layer of every two has the window."""
    check_switches(hf, NAME, {"hidden_act": "silu", "attention_bias": True, "swiglu_limit": _LIMIT})
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        raise FamilyError(f"{NAME}: config.json has no rope_parameters or rope_scaling; transformers assumes YaRN then")
    base = decoder(hf, NAME, dtype)
    theta, yarn = read_rope(hf, NAME, _YARN)
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
