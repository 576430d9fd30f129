"""moeref: the glue between Megatron-Core and an inference engine in RL of MoE models.

Packages, each importing only those to its left: `layout`, `families`, `bridge`, `exporter`; and `layout`, `families`,
`config`. Only `moeref.megatron` imports megatron-core, and no other package imports `moeref.megatron`.
"""

from moeref.layout import Layout, LayoutError

__all__ = ["Layout", "LayoutError"]
