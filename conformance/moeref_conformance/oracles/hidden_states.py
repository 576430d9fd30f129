"""The hidden states that enter the norms of transformers' decoder, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from moeref_conformance.oracles import routed
from moeref_conformance.oracles.expected import Expected


def entering_norms(expected: Expected, routes: str = "", missing: bool = True) -> list[torch.Tensor]:
    """In fp32 [B, S, H]: what enters each layer, what its attention makes of it, and so on; at last, what enters the
    norm behind all layers. Under the route set `routes`, with `missing` rows or without, else the routers' own."""
    found: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        found.append(args[0])

    given = routed.given_routes(expected, routes, missing) if routes else ()
    with routed.alone(expected) as model, routed.forcing(expected, given):
        norms = [norm for of in model.model.layers for norm in (of.input_layernorm, of.post_attention_layernorm)]
        handles = [norm.register_forward_pre_hook(keep) for norm in [*norms, model.model.norm]]
        try:
            model(expected.tokens_BS.clamp_min(0))
        finally:
            for handle in handles:
                handle.remove()
    return found
