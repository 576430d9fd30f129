"""moeref: the glue between Megatron-Core and an inference engine in RL of MoE models.

`tests/unit/test_import_arrows.py` lists which package may import which. Only `moeref.megatron` imports megatron-core,
and no other package but the command line imports `moeref.megatron`.
"""

from moeref.layout import Layout, LayoutError

__all__ = ["Layout", "LayoutError"]
