"""Effective Megatron settings of a model under a layout, each with its origin.

The beginnings of the audited record: what megatron-core's TransformerConfig is given, and why. Origins: `hf` (read from
the Hugging Face config), `layout`, `override` (given by the caller; wins), `derived` (follows from another setting).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moeref.families.model import MLA, Model
from moeref.layout import Layout

Origin = Literal["hf", "layout", "override", "derived"]


@dataclass(frozen=True)
class Setting:
    """One effective value and where it came from."""

    value: Any
    origin: Origin


def transformer_settings(model: Model, layout: Layout) -> dict[str, Setting]:
    """TransformerConfig fields for `model` under `layout`.

    `moeref.megatron.build` adds those whose values are torch objects, and the caller's overrides, which win, also with
    `False` and `None`.
    """
    hf: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_groups,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "layernorm_epsilon": model.norm_eps,
        "qk_layernorm": model.qk_norm,
        "add_qkv_bias": model.qkv_bias,
        "num_moe_experts": model.experts,
        "moe_ffn_hidden_size": model.moe_ffn,
        "moe_router_topk": model.top_k,
        "moe_router_score_function": model.score_function,
        "moe_router_enable_expert_bias": model.expert_bias,
        "moe_shared_expert_intermediate_size": model.shared_ffn or None,
        "moe_layer_freq": [int(moe) for moe in model.moe_layers],
    }
    if model.mla:
        hf |= _mla_settings(model.mla, model.rope_theta)
    if model.mtp_layers:
        hf |= {"mtp_num_layers": model.mtp_layers}
    derived: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        # No dropout in RL: the trainer's forward has to repeat what the engine computed.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_router_load_balancing_type": "none",
        # Softmax over the chosen top-k equals a normalised softmax over all; without normalisation it comes first.
        "moe_router_pre_softmax": model.score_function == "softmax" and not model.norm_topk_prob,
        "moe_router_topk_scaling_factor": model.routed_scaling_factor if model.routed_scaling_factor != 1.0 else None,
        # megatron-core refuses MoE training with TP > 1 without it.
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": False,
    }
    if model.n_group > 1:
        derived |= {"moe_router_num_groups": model.n_group, "moe_router_group_topk": model.topk_group}
    placed: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        # With a layout string megatron-core derives the number of virtual stages itself.
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 and not layout.layout else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers_in_first_pipeline_stage": layout.first,
        "num_layers_in_last_pipeline_stage": layout.last,
        "account_for_embedding_in_pipeline_split": layout.embedding,
        "account_for_loss_in_pipeline_split": layout.loss,
        "pipeline_model_parallel_layout": layout.layout,
    }
    settings = {k: Setting(v, "hf") for k, v in hf.items()}
    settings |= {k: Setting(v, "derived") for k, v in derived.items()}
    settings |= {k: Setting(v, "layout") for k, v in placed.items()}
    return settings


def _mla_settings(mla: MLA, theta: float) -> dict[str, Any]:
    """Fields of MLATransformerConfig, which holds the rope of MLA too."""
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_rank or None,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope,
        "qk_pos_emb_head_dim": mla.rope,
        "v_head_dim": mla.v,
        "rope_type": "yarn" if mla.yarn else "rope",
        "rotary_base": theta,
    }
    if mla.yarn is None:
        # Softmax is scaled by m(mscale_all_dim)² whatever the rope type; a factor of 1 makes that 1.
        return fields | {"rotary_scaling_factor": 1.0}
    return fields | {
        "rotary_scaling_factor": mla.yarn.factor,
        "original_max_position_embeddings": mla.yarn.original_positions,
        "beta_fast": mla.yarn.beta_fast,
        "beta_slow": mla.yarn.beta_slow,
        "mscale": mla.yarn.mscale,
        "mscale_all_dim": mla.yarn.mscale_all_dim,
    }
