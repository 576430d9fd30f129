"""The bridge: local ↔ global names, Hugging Face ↔ Megatron tensors, loading under any layout.

`ShardMap` is the arithmetic: which parameters there are and where they lie. `load` fills real chunks, and
`exporter` streams them out again.
"""

from moeref.bridge.checkpoint import Checkpoint
from moeref.bridge.loader import bind, hf_tensors, inventory, load
from moeref.bridge.regions import BridgeError, CopyRegion, Shard, padded_vocab, shard_regions
from moeref.bridge.shard_map import VOCAB_DIVISIBLE_BY, GlobalParam, HFTensor, LocalShard, ShardMap

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
