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
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, "model_type": "qwen3_moe", "num_experts": 16, "norm_topk_prob": True},
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
}


def model(family: str, **changes: Any) -> families.Model:
    """The family's small model with some config keys changed."""
    return families.read({**CONFIGS[family], **changes})
