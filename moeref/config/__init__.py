"""What Megatron is given, and why: every effective value of a model under a layout with its origin.

`MoEConfig` is what is asked for, `resolve` makes the record, `apply` puts it into a real config and reads it back.
"""

from moeref.config.apply import apply, read_back
from moeref.config.effective import Difference, EffectiveSettings, plain
from moeref.config.errors import ConfigError
from moeref.config.policy_reference import barrier_needed, declared_differences, for_reference
from moeref.config.resolve import resolve
from moeref.config.setting import Origin, Setting
from moeref.config.settings import transformer_settings
from moeref.config.user_config import UNSET, MoEConfig, Unset

__all__ = [
    "UNSET",
    "ConfigError",
    "Difference",
    "EffectiveSettings",
    "MoEConfig",
    "Origin",
    "Setting",
    "Unset",
    "apply",
    "barrier_needed",
    "declared_differences",
    "for_reference",
    "plain",
    "read_back",
    "resolve",
    "transformer_settings",
]
