"""The hidden states that enter the norms of transformers' decoder, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from moeref_conformance.oracles import routed
from moeref_conformance.oracles.expected import Expected


def entering_norms(expected: Expected, routes: str = "", missing: bool = True) -> list[torch.Tensor]:
    """In fp32 [B, S, H]: what enters each layer, what its attention makes of it, and so on; at last, what enters the
    norm after all layers. Under routes as `routed.entering`."""
    return routed.entering(expected, _norms, routes, missing)[1]


def _norms(model: Any) -> list[torch.nn.Module]:
    of_layers = [norm for of in model.model.layers for norm in (of.input_layernorm, of.post_attention_layernorm)]
    return [*of_layers, model.model.norm]
