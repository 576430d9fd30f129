"""DeepSeek sparse attention (DSA): megatron-core's own DSAttention and DSAIndexer, with linears of plain torch.

megatron-core computes both without kernels of its own where `dsa_kernel_backend` is "none". Its spec takes Transformer
Engine's linears for the indexer alone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec

from moeref.config import ConfigError
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


class SparseAttention(dsa.DSAttention):  # type: ignore[misc]
    """DSAttention that refuses to share keys where a layer is computed again."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> torch.Tensor:
        """As DSAttention. Raises ConfigError for a layer that would not find the keys of its microbatch again.

        megatron-core keeps them in the packing of the microbatch, else in its mask, else in the config. A layer that is
        computed again is given a copy of the mask, and in the config are the keys of a later microbatch.
        """
        if self.index_share and packed_seq_params is None and self.training and _is_recomputed(self.config):
            raise ConfigError(
                f"recompute_granularity={self.config.recompute_granularity!r} with layers that share their keys: a "
                "layer that is computed again does not find those of its microbatch; give packed samples, or do not "
                "recompute attention"
            )
        out: torch.Tensor = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        return out


def _is_recomputed(config: Any) -> bool:
    granularity = config.recompute_granularity
    return granularity == "full" or (granularity == "selective" and "core_attn" in config.recompute_modules)


def core_attention() -> ModuleSpec:
    """The spec of attention to the keys that an indexer chooses."""
    parts = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), _Linear)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=dsa.DSAIndexerSubmodules(**parts, k_norm=_LayerNorm))
    return ModuleSpec(module=SparseAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer))


def freeze_indexers(chunk: torch.nn.Module) -> None:
    """Exclude indexers from training: no gradient reaches them, so an optimizer would only decay their weights."""
    for name, parameter in chunk.named_parameters():
        if _INDEXER in name:
            parameter.requires_grad_(False)
