"""The bridge: local ↔ global names, Hugging Face ↔ Megatron tensors, loading under any layout.

`ShardMap` is the arithmetic: which parameters there are and where they lie. `load` fills real chunks, and
`exporter` streams them out again. What needs torch is imported on first use: the arithmetic does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeref.bridge.regions import BridgeError, CopyRegion, Shard, padded_vocab, shard_regions
from moeref.bridge.shard_map import VOCAB_DIVISIBLE_BY, GlobalParam, HFTensor, LocalShard, ShardMap, hf_tensors

if TYPE_CHECKING:
    from moeref.bridge.checkpoint import Checkpoint
    from moeref.bridge.loader import bind, inventory, load

_NEED_TORCH = ("Checkpoint", "bind", "inventory", "load")

__all__ = [
    "VOCAB_DIVISIBLE_BY",
    "BridgeError",
    "Checkpoint",
    "CopyRegion",
    "GlobalParam",
    "HFTensor",
    "LocalShard",
    "Shard",
    "ShardMap",
    "bind",
    "hf_tensors",
    "inventory",
    "load",
    "padded_vocab",
    "shard_regions",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moeref.bridge import loader

    return getattr(loader, name)
