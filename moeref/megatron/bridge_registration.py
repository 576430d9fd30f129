"""Adds GLM-4.7-Flash to versions of megatron-bridge that lack it.

megatron-bridge is not a dependency of moeref; it is imported only when `register_glm4_moe_lite` is called.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from moeref import families
from moeref.config import transformer_settings
from moeref.layout import Layout

ARCHITECTURE, MODEL_TYPE = "Glm4MoeLiteForCausalLM", "glm4_moe_lite"


def register_glm4_moe_lite() -> Literal["registered", "already registered"]:
    """Register `Glm4MoeLiteForCausalLM` with megatron-bridge, unless the installed version already has it.

    Parameter mappings are those of DeepSeek-V3's bridge; the provider's values come from `moeref.families`.
    Multi-token prediction layers are left out, because that bridge has no mapping for them. Raises ImportError without
    megatron-bridge.
    """
    from megatron.bridge import AutoBridge

    if ARCHITECTURE in AutoBridge.list_supported_models():
        return "already registered"
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.models.gpt import GPTModel

    class Glm4MoeLiteBridge(DeepSeekV3Bridge):  # type: ignore[misc]
        """DeepSeek-V3's bridge with a provider for GLM-4.7-Flash's config."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            """The provider for a GLM-4.7-Flash config. The config is not modified."""
            model = families.read({**hf_pretrained.config.to_dict(), "model_type": MODEL_TYPE})
            provider = super().provider_bridge(_WithFlatRope(hf_pretrained, model.rope_theta))
            for name, setting in transformer_settings(model, Layout()).items():
                if setting.origin == "hf" and name != "mtp_num_layers":
                    setattr(provider, name, setting.value)
            return provider

    register = MegatronModelBridge.register_bridge(
        source=ARCHITECTURE, target=GPTModel, provider=MLAModelProvider, model_type=MODEL_TYPE
    )
    register(Glm4MoeLiteBridge)
    return "registered"


class _WithFlatRope:
    """A pretrained model with a copy of its config that describes RoPE as DeepSeek's bridge expects.

    That bridge reads `rope_theta` at the top level and treats any `rope_scaling` as scaled RoPE with an mscale.
    GLM-4.7-Flash has its theta inside `rope_scaling` and no scaling.
    """

    def __init__(self, given: Any, theta: float) -> None:
        self._given, self.config = given, copy.copy(given.config)
        scaling = getattr(given.config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            self.config.rope_scaling = None
        self.config.rope_theta = theta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)
