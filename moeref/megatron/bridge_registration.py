"""GLM-4.7-Flash for versions of megatron-bridge that do not know it.

megatron-bridge is imported when `register_glm4_moe_lite` is called, never before: it is no dependency of moeref.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from moeref import families
from moeref.config import transformer_settings
from moeref.layout import Layout

ARCHITECTURE, MODEL_TYPE = "Glm4MoeLiteForCausalLM", "glm4_moe_lite"


def register_glm4_moe_lite() -> Literal["registered", "already registered"]:
    """Add `Glm4MoeLiteForCausalLM` to megatron-bridge where the installed version lacks it, and say which it was.

    The bridge is DeepSeek-V3's, whose tensor table GLM-4.7-Flash shares, with a provider that holds what
    `moeref.families` reads. Multi-token prediction layers are left out, as that bridge has no mapping for them.
    Raises ImportError without megatron-bridge.
    """
    from megatron.bridge import AutoBridge

    if ARCHITECTURE in AutoBridge.list_supported_models():
        return "already registered"
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.models.gpt import GPTModel

    class Glm4MoeLiteBridge(DeepSeekV3Bridge):  # type: ignore[misc]
        """DeepSeek-V3's bridge with the values of GLM-4.7-Flash, which are elsewhere in its config or not in it."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            """The provider of a GLM-4.7-Flash config, which is only read."""
            found = families.read({**hf_pretrained.config.to_dict(), "model_type": MODEL_TYPE})
            provider = super().provider_bridge(_WithFlatRope(hf_pretrained, found.rope_theta))
            for name, setting in transformer_settings(found, Layout()).items():
                if setting.origin == "hf" and name != "mtp_num_layers":
                    setattr(provider, name, setting.value)
            return provider

    register = MegatronModelBridge.register_bridge(
        source=ARCHITECTURE, target=GPTModel, provider=MLAModelProvider, model_type=MODEL_TYPE
    )
    register(Glm4MoeLiteBridge)
    return "registered"


class _WithFlatRope:
    """A pretrained model, or a stand-in for one, whose config is a copy with the rope where DeepSeek's bridge looks.

    That bridge wants `rope_theta` on top and takes any `rope_scaling` for a scaled rope with an mscale; GLM-4.7-Flash
    has its theta inside `rope_scaling`, and nothing is scaled. The config that was given is never written to.
    """

    def __init__(self, given: Any, theta: float) -> None:
        self._given, self.config = given, copy.copy(given.config)
        scaling = getattr(given.config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            self.config.rope_scaling = None
        self.config.rope_theta = theta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)
