"""Everything that imports megatron-core: process groups, model chunks, seeding, routing replay, forward, gradients."""

from moeref.megatron.build import Built, build, transformer_config
from moeref.megatron.forward import logits, packed_logits
from moeref.megatron.groups import initialise, shut_down
from moeref.megatron.lora import Lora
from moeref.megatron.snapshot import Snapshot
from moeref.megatron.spec import mtp_name
from moeref.megatron.token_logprobs import Logprobs, logprobs, packed_logprobs
from moeref.megatron.training import (
    gradients,
    packed_gradients,
    packed_policy_gradients,
    packed_total,
    policy_gradients,
)

__all__ = [
    "Built",
    "Logprobs",
    "Lora",
    "Snapshot",
    "build",
    "gradients",
    "initialise",
    "logits",
    "logprobs",
    "mtp_name",
    "packed_gradients",
    "packed_logits",
    "packed_logprobs",
    "packed_policy_gradients",
    "packed_total",
    "policy_gradients",
    "shut_down",
    "transformer_config",
]
