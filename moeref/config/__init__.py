"""What Megatron is given, and why: every effective value of a model under a layout with its origin."""

from moeref.config.settings import Origin, Setting, transformer_settings

__all__ = ["Origin", "Setting", "transformer_settings"]
