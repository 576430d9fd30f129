"""Rows that the GQA decoder families share. Source: megatron-core's GPT layer specs and transformers' saved names."""

from __future__ import annotations

from moeref.families.model import ParamMapping, Tensor

_L, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = ParamMapping(
    megatron="embedding.word_embeddings.weight",
    hf=(Tensor("model.embed_tokens.weight", ("vocab", "hidden")),),
    alias=Tensor(_H + "embed_tokens.weight", ("vocab", "hidden")),
    sharding="vocab",
    where="first",
)
HEAD = (
    ParamMapping(
        megatron="decoder.final_layernorm.weight", hf=(Tensor("model.norm.weight", ("hidden",)),), where="last"
    ),
    ParamMapping(
        megatron="output_layer.weight",
        hf=(Tensor("lm_head.weight", ("vocab", "hidden")),),
        alias=Tensor(_H + "shared_head.head.weight", ("vocab", "hidden")),
        sharding="vocab",
        where="last",
    ),
)


def _qkv(kind: str, dims: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"{_H}self_attn.{part}_proj.{kind}", (size, *dims))
        for part, size in (("q", "q"), ("k", "kv"), ("v", "kv"))
    )


ATTENTION = (
    ParamMapping(
        megatron=_L + "input_layernorm.weight",
        te_name=_L + "self_attention.linear_qkv.layer_norm_weight",
        hf=(Tensor(_H + "input_layernorm.weight", ("hidden",)),),
    ),
    ParamMapping(megatron=_L + "self_attention.linear_qkv.weight", hf=_qkv("weight", ("hidden",)), sharding="qkv"),
    ParamMapping(
        megatron=_L + "self_attention.linear_qkv.bias", hf=_qkv("bias", ()), sharding="qkv", only_if="qkv_bias"
    ),
    ParamMapping(
        megatron=_L + "self_attention.q_layernorm.weight",
        hf=(Tensor(_H + "self_attn.q_norm.weight", ("head_dim",)),),
        only_if="qk_norm",
    ),
    ParamMapping(
        megatron=_L + "self_attention.k_layernorm.weight",
        hf=(Tensor(_H + "self_attn.k_norm.weight", ("head_dim",)),),
        only_if="qk_norm",
    ),
    ParamMapping(
        megatron=_L + "self_attention.linear_proj.weight",
        hf=(Tensor(_H + "self_attn.o_proj.weight", ("hidden", "q")),),
        sharding="row",
    ),
)


def gated(megatron: str, hf: str, width: str) -> tuple[Tensor, ...]:
    """The gate and up tensors of a gated MLP of `width` rows each."""
    return tuple(Tensor(f"{hf}{part}_proj.weight", (width, "hidden")) for part in ("gate", "up"))


def mlp(megatron: str, hf: str, width: str, where: str, only_if: str = "") -> tuple[ParamMapping, ...]:
    """The two rows of a gated MLP split over TP."""
    return (
        ParamMapping(
            megatron=f"{megatron}linear_fc1.weight",
            hf=gated(megatron, hf, width),
            sharding="gate_up",
            where=where,  # type: ignore[arg-type]
            only_if=only_if,
        ),
        ParamMapping(
            megatron=f"{megatron}linear_fc2.weight",
            hf=(Tensor(f"{hf}down_proj.weight", ("hidden", width)),),
            sharding="row",
            where=where,  # type: ignore[arg-type]
            only_if=only_if,
        ),
    )


_POST_NORM = (Tensor(_H + "post_attention_layernorm.weight", ("hidden",)),)
DENSE = (
    ParamMapping(
        megatron=_L + "pre_mlp_layernorm.weight",
        te_name=_L + "mlp.linear_fc1.layer_norm_weight",
        hf=_POST_NORM,
        where="dense",
    ),
    *mlp(_L + "mlp.", _H + "mlp.", "ffn", "dense"),
)
PRE_MOE_NORM = ParamMapping(megatron=_L + "pre_mlp_layernorm.weight", hf=_POST_NORM, where="moe")
GATE = ParamMapping(
    megatron=_L + "mlp.router.weight", hf=(Tensor(_H + "mlp.gate.weight", ("experts", "hidden")),), where="moe"
)
ROUTER = (
    PRE_MOE_NORM,
    GATE,
    # A buffer, not a parameter; bf16 keeps 8 of its 238 distinct values (miles#811), so it stays fp32.
    ParamMapping(
        megatron=_L + "mlp.router.expert_bias",
        hf=(Tensor(_H + "mlp.gate.e_score_correction_bias", ("experts",)),),
        where="moe",
        only_if="expert_bias",
        dtype="float32",
    ),
)
EXPERTS = (
    ParamMapping(
        megatron=_L + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        grouped_name=_L + "mlp.experts.linear_fc1.weight{expert}",
        hf=gated(_L, _H + "mlp.experts.{expert}.", "moe_ffn"),
        fused=Tensor(_H + "mlp.experts.gate_up_proj", ("experts", "2moe_ffn", "hidden")),
        sharding="gate_up",
        where="moe",
    ),
    ParamMapping(
        megatron=_L + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        grouped_name=_L + "mlp.experts.linear_fc2.weight{expert}",
        hf=(Tensor(_H + "mlp.experts.{expert}.down_proj.weight", ("hidden", "moe_ffn")),),
        fused=Tensor(_H + "mlp.experts.down_proj", ("experts", "hidden", "moe_ffn")),
        sharding="row",
        where="moe",
    ),
)
SHARED = mlp(_L + "mlp.shared_experts.", _H + "mlp.shared_experts.", "shared_ffn", "moe", only_if="shared_ffn")
_MTP = "mtp.layers.{layer}."
#: Around the transformer layer of an MTP layer, whose rows are the decoder's.
MTP = (
    ParamMapping(megatron=_MTP + "enorm.weight", hf=(Tensor(_H + "enorm.weight", ("hidden",)),), where="mtp"),
    ParamMapping(megatron=_MTP + "hnorm.weight", hf=(Tensor(_H + "hnorm.weight", ("hidden",)),), where="mtp"),
    # [embedding | hidden state] in both.
    ParamMapping(
        megatron=_MTP + "eh_proj.weight",
        hf=(Tensor(_H + "eh_proj.weight", ("hidden", "2hidden")),),
        sharding="column",
        where="mtp",
    ),
    ParamMapping(
        megatron=_MTP + "final_layernorm.weight", hf=(Tensor(_H + "shared_head.norm.weight", ("hidden",)),), where="mtp"
    ),
)
