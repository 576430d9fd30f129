"""The only room that imports megatron-core: groups, real model chunks, a forward pass."""

from moeref.megatron.build import Built, build, transformer_config
from moeref.megatron.forward import logits
from moeref.megatron.groups import initialise, shut_down

__all__ = ["Built", "build", "initialise", "logits", "shut_down", "transformer_config"]
