"""DeepSeek sparse attention (DSA): megatron-core's own DSAttention and DSAIndexer, with linears of plain torch.

megatron-core computes both without kernels of its own where `dsa_kernel_backend` is "none". Its spec takes Transformer
Engine's linears for the indexer alone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.megatron.attention import ReplicatedLinear

_INDEXER = ".core_attention.indexer."


class _Linear(ReplicatedLinear):
    """`ReplicatedLinear` with the constructor of Transformer Engine's linears."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config, torch.empty(0, dtype=config.params_dtype))


class _LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with the constructor of Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


def core_attention() -> ModuleSpec:
    """The spec of attention to the keys that an indexer chooses."""
    # Version 0.16 has an older one with other constructors; the table of rules refuses it.
    from megatron.core.transformer.experimental_attention_variant import dsa

    parts = {name: _Linear for name in ("linear_wq_b", "linear_wk", "linear_weights_proj")}
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=dsa.DSAIndexerSubmodules(**parts, k_norm=_LayerNorm))
    return ModuleSpec(module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer))


def freeze_indexers(chunk: torch.nn.Module) -> None:
    """Exclude indexers from training: no gradient reaches them, so an optimizer would only decay their weights."""
    for name, parameter in chunk.named_parameters():
        if _INDEXER in name:
            parameter.requires_grad_(False)
