"""The bridge: local ↔ global names, Hugging Face ↔ Megatron tensors, loading under any layout.

`Table` is the arithmetic (what exists, where it lies); `load` fills real chunks; `exporter` streams them out again.
"""

from moeref.bridge.blocks import Block, BridgeError, padded_vocab, shard_blocks
from moeref.bridge.checkpoint import Checkpoint
from moeref.bridge.loader import bind, hf_tensors, inventory, load, spelled_as
from moeref.bridge.units import VOCAB_DIVISIBLE_BY, HFTensor, Placed, Table, Unit

__all__ = [
    "VOCAB_DIVISIBLE_BY",
    "Block",
    "BridgeError",
    "Checkpoint",
    "HFTensor",
    "Placed",
    "Table",
    "Unit",
    "bind",
    "hf_tensors",
    "inventory",
    "load",
    "padded_vocab",
    "shard_blocks",
    "spelled_as",
]
