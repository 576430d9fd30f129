"""The only room that imports megatron-core: groups, real model chunks, a forward pass."""

from moeref.megatron.build import Built, build, transformer_config
from moeref.megatron.forward import logits
from moeref.megatron.groups import initialise, shut_down
from moeref.megatron.spec import mtp_name

__all__ = ["Built", "build", "initialise", "logits", "mtp_name", "shut_down", "transformer_config"]
