"""Functions that moeref calls and vLLM has since 0.30, for the versions before that."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

try:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
except ImportError:

    def is_deferred_attention_layer(layer: torch.nn.Module) -> bool:
        """Whether a layer is processed after all others when weights were loaded."""
        return isinstance(layer, (Attention, MLAAttention))


try:
    from vllm.v1.kv_cache_interface import is_full_attention_spec
except ImportError:

    def is_full_attention_spec(spec: Any) -> bool:
        """Whether a group of the KV cache keeps every token, so that a slot is of one token."""
        layers = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        return bool(layers) and all(isinstance(layer, FullAttentionSpec) for layer in layers)


__all__ = ["is_deferred_attention_layer", "is_full_attention_spec"]
