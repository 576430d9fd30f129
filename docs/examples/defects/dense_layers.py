"""megatron-bridge: the provider of Qwen3-Next makes every layer one of experts, whatever `mlp_only_layers` says.

Published models have no dense layer. One that has loses it without a word: its experts keep their initial values on
loading, and its dense weights are in no export.
"""

from by_hand import on_ranks, tell

DENSE = [0]
LAYERS = 4


def provided() -> list[int]:
    """The layers of experts that the provider asks megatron-core for."""
    from megatron.bridge import AutoBridge
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=LAYERS, mlp_only_layers=DENSE, architectures=["Qwen3NextForCausalLM"])
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    every = provider.moe_layer_freq
    of = every if isinstance(every, list) else [int(layer % every == 0) for layer in range(LAYERS)]
    return [layer for layer, experts in enumerate(of) if experts]


if __name__ == "__main__":
    (found,) = on_ranks(1, provided)
    tell(0 in found, f"mlp_only_layers={DENSE}; the provider has experts in layers {found} of {LAYERS}")
