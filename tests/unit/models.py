"""Small models for the unit tests: rectangular, pairwise distinct sizes, as config.json would give them."""

from __future__ import annotations

from typing import Any

from moeref import families

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 6,
    "intermediate_size": 80,
    "moe_intermediate_size": 56,
    "vocab_size": 131,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "dtype": "float32",
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.0,
}
LATENT: dict[str, Any] = {
    **{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")},
    "num_key_value_heads": 16,
    "q_lora_rank": 26,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
}
#: transformers takes `num_experts` for that of DeepSeek-V3.2.
INDEXER: dict[str, Any] = {"index_n_heads": 3, "index_head_dim": 12, "index_topk": 7, "num_experts": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, "model_type": "qwen3_moe", "num_experts": 16, "norm_topk_prob": True},
    "mixtral": {
        **{k: v for k, v in SIZES.items() if k != "moe_intermediate_size"},
        "model_type": "mixtral",
        "num_local_experts": 16,
    },
    "minimax_m2": {
        **{k: v for k, v in SIZES.items() if k != "moe_intermediate_size"},
        "model_type": "minimax_m2",
        "num_local_experts": 16,
        # Published configs have the first alone, and transformers reads the second alone.
        "rotary_dim": 4,
        "rope_parameters": {**SIZES["rope_parameters"], "partial_rotary_factor": 4 / 6},
    },
    "glm4_moe": {
        **SIZES,
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.7,
    },
    "deepseek_v3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": YARN,
    },
    "deepseek_v32": {
        **LATENT,
        **INDEXER,
        "model_type": "deepseek_v32",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": YARN,
    },
    # As a text model's config inside the whole one is read: its keys are among the others'.
    "kimi_k25": {
        **LATENT,
        "model_type": "kimi_k25",
        "text_config": {"model_type": "deepseek_v3"},
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.7,
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN,
    },
    "gpt_oss": {
        **{k: v for k, v in SIZES.items() if k != "moe_intermediate_size"},
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "sliding_window": 5,
        "rope_parameters": {
            **{k: v for k, v in YARN.items() if not k.startswith("mscale")},
            "truncate": False,
        },
    },
    "glm4_moe_lite": {**LATENT, "model_type": "glm4_moe_lite", "routed_scaling_factor": 1.8},
    "glm_moe_dsa": {
        **LATENT,
        **INDEXER,
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.9,
        "indexer_rope_interleave": True,
    },
    "qwen3_next": {
        **SIZES,
        "model_type": "qwen3_next",
        "num_experts": 64,
        "shared_expert_intermediate_size": 72,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 3,
        "mlp_only_layers": [1],
    },
}


def model(family: str, **changes: Any) -> families.Model:
    """The family's small model with some config keys changed."""
    return families.read({**CONFIGS[family], **changes})
