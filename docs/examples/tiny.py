"""Tiny random checkpoints of published architectures, in sizes that vLLM's CPU kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    # transformers fixes the norms of latent queries and keys at 1e-6, vLLM takes this value for them too.
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: GLM's and DeepSeek's: a dense first layer, a shared expert, sigmoid scores with a bias.
SHARED = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
#: Latent attention. The CPU's kernel decodes with 512 + 64 latent dimensions only.
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, "num_experts": 16, "norm_topk_prob": True},
    "glm4_moe": {
        **SIZES,
        **SHARED,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **WITHOUT_HEAD_DIM,
        **SHARED,
        **LATENT,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **WITHOUT_HEAD_DIM,
        **SHARED,
        **LATENT,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        # Published files have both; vLLM takes softmax scores without a bias where they are missing.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        **SIZES,
        "num_local_experts": 16,
        "rotary_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        # In published configs, unknown to transformers' class, read by engines.
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    },
}


def write(family: str, folder: Path, dtype: str, seed: int = 0) -> None:
    """Write a checkpoint of random weights; the experts' bias is random too, and stays fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, dtype=dtype, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # unit variance through every matrix, so that experts weigh as much as attention
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(folder)
