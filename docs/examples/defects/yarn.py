"""megatron-bridge: the provider of gpt-oss has the published models' YaRN, whatever the config says.

`GPTOSSBridge` writes factor, original length and betas as constants. Every gpt-oss model whose rope parameters are not
the published ones is affected: one that was trained on for longer contexts, or a small one.
"""

from by_hand import on_ranks, tell

ASKED = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
FIELDS = {
    "factor": "yarn_rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def provided() -> dict[str, float]:
    """What the provider holds of the parameters that the config asks for."""
    from megatron.bridge import AutoBridge
    from transformers import GptOssConfig

    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "truncate": False, **ASKED}
    config = GptOssConfig(rope_parameters=rope, architectures=["GptOssForCausalLM"])
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    return {name: getattr(provider, field) for name, field in FIELDS.items()}


if __name__ == "__main__":
    (found,) = on_ranks(1, provided)
    tell(found != ASKED, f"the config says {ASKED}; the provider holds {found}")
