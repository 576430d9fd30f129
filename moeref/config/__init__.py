"""The settings that Megatron gets: every effective value of a model under a layout, with its origin.

`MoEConfig` holds what the user asks for, `resolve` computes the effective settings, and `apply` writes them to a real
config and reads them back.
"""

from moeref.config.apply import apply, read_back
from moeref.config.effective import Difference, EffectiveSettings, plain
from moeref.config.errors import ConfigError
from moeref.config.policy_reference import declared_differences, for_reference
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
    "declared_differences",
    "for_reference",
    "plain",
    "read_back",
    "resolve",
    "transformer_settings",
]
