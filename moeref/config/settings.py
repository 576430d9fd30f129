"""TransformerConfig fields of a model under a layout, before the user asks for anything."""

from __future__ import annotations

from typing import Any

from moeref.config.rules import check_layout
from moeref.config.setting import Setting
from moeref.families.model import MLA, GatedDeltaNet, Indexer, Model, Yarn
from moeref.layout import Layout

#: YaRN attributes that GPTModel reads from its config by `getattr`; they are not fields of TransformerConfig.
ATTRIBUTES = frozenset(
    "yarn_" + name
    for name in (
        *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "correction_range_round_to_int"),
    )
)


#: The defaults of every model.
_DEFAULTS: dict[str, Any] = {
    # No dropout in RL: the trainer's forward must reproduce the engine's.
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_load_balancing_type": "none",
    "variable_seq_lengths": False,
}


def transformer_settings(model: Model, layout: Layout) -> dict[str, Setting]:
    """TransformerConfig fields for `model` under `layout`.

    Raises LayoutError for a layout under which megatron-core or moeref cannot compute this model.
    """
    check_layout(model, layout)
    settings = {k: Setting(v, "default") for k, v in _DEFAULTS.items()}
    settings |= {k: Setting(v, "hf") for k, v in _hf_settings(model).items()}
    settings |= {k: Setting(v, "layout") for k, v in _layout_settings(layout).items()}
    if model.indexer and layout.cp > 1:
        settings["cp_comm_type"] = Setting("all_gather", "default", "sparse attention has no other")
    return settings


def _hf_settings(model: Model) -> dict[str, Any]:
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
    if model.gated_delta_net:
        hf |= _delta_settings(model.gated_delta_net)
    if model.indexer:
        hf |= _indexer_settings(model.indexer)
    hf |= _attention_settings(model)
    if model.clamp:
        hf |= {"activation_func_clamp_value": model.clamp, "glu_linear_offset": 1.0}
    hf |= {field: True for field, given in _switches(model).items() if given}
    if model.mtp_layers:
        hf |= {"mtp_num_layers": model.mtp_layers}
    hf |= {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": model.linear_bias,
        # Softmax over the top-k logits equals the normalised top-k of a softmax over all; without normalisation
        # softmax comes before top-k.
        "moe_router_pre_softmax": model.score_function == "softmax" and not model.norm_topk_prob,
        "moe_router_topk_scaling_factor": model.routed_scaling_factor if model.routed_scaling_factor != 1.0 else None,
    }
    if model.fp32_router:
        hf |= {"moe_router_dtype": "fp32"}  # Megatron's default is the parameters' dtype
    if model.n_group > 1:
        hf |= {"moe_router_num_groups": model.n_group, "moe_router_group_topk": model.topk_group}
    return hf


def _layout_settings(layout: Layout) -> dict[str, Any]:
    return {
        # megatron-core refuses MoE training with TP > 1 without it.
        "sequence_parallel": layout.tp > 1,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        # With a layout string megatron-core derives the number of virtual stages itself.
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 and not layout.pipeline_layout else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers_in_first_pipeline_stage": layout.first,
        "num_layers_in_last_pipeline_stage": layout.last,
        "account_for_embedding_in_pipeline_split": layout.embedding,
        "account_for_loss_in_pipeline_split": layout.loss,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
    }


def _attention_settings(model: Model) -> dict[str, Any]:
    """Sinks, sliding windows and YaRN: what gpt-oss adds to grouped-query attention."""
    fields: dict[str, Any] = {"softmax_type": "learnable"} if model.sinks else {}
    if model.window:
        # Tokens before and after the query's own.
        fields |= {"window_size": (model.window.size - 1, 0)}
        fields |= {"window_attn_skip_freq": [int(slides) for slides in model.window.layers]}
    if model.yarn:
        # See ATTRIBUTES.
        fields |= {f"yarn_{name}": value for name, value in _yarn_settings(model.yarn).items()}
        fields |= {"yarn_correction_range_round_to_int": model.yarn.truncate}
    return fields


def _switches(model: Model) -> dict[str, bool]:
    """Boolean fields that are set only for models that need them; off by default."""
    return {
        "attention_output_gate": model.output_gate,
        "moe_shared_expert_gate": model.shared_gate,
        "layernorm_zero_centered_gamma": model.zero_centered,
    }


def _delta_settings(delta: GatedDeltaNet) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(is_delta) for is_delta in delta.layers],
        "linear_conv_kernel_dim": delta.kernel,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def _indexer_settings(indexer: Indexer) -> dict[str, Any]:
    every, first = indexer.shared or (1, 1)
    sharing = {"dsa_indexer_topk_freq": every, "dsa_indexer_skip_topk_offset": first} if every > 1 else {}
    return {
        **sharing,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": indexer.heads,
        "dsa_indexer_head_dim": indexer.head_dim,
        "dsa_indexer_topk": indexer.top_k,
        "dsa_indexer_rope_interleaved": indexer.interleaved,
        # Products of queries and keys are the same without this rotation, which is for FP8 and needs a package.
        "dsa_indexer_rotate_activation": False,
        # Of the LayerNorm of keys, in transformers and in engines whatever rms_norm_eps says.
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }


def _mla_settings(mla: MLA, theta: float) -> dict[str, Any]:
    """Fields of MLATransformerConfig, which include the RoPE of MLA."""
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
        # megatron-core scales softmax by m(mscale_all_dim)² for every rope type; with a factor of 1 this is 1.
        return fields | {"rotary_scaling_factor": 1.0}
    return fields | _yarn_settings(mla.yarn)


def _yarn_settings(yarn: Yarn) -> dict[str, Any]:
    return {
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
