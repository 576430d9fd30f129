"""What Megatron is given, and why: every effective value of a model under a layout with its origin.

`MoEConfig` is what is asked for, `resolve` makes the record, `apply` puts it into a real config and reads it back.
"""

from moeref.config.apply import apply, read_back
from moeref.config.asked import UNSET, MoEConfig, Unset
from moeref.config.errors import ConfigError
from moeref.config.record import Difference, Record, plain
from moeref.config.resolve import resolve
from moeref.config.settings import Origin, Setting, transformer_settings
from moeref.config.shared import barrier_needed, for_reference, shared

__all__ = [
    "UNSET",
    "ConfigError",
    "Difference",
    "MoEConfig",
    "Origin",
    "Record",
    "Setting",
    "Unset",
    "apply",
    "barrier_needed",
    "for_reference",
    "plain",
    "read_back",
    "resolve",
    "shared",
    "transformer_settings",
]
