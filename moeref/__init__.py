"""moeref: the glue between Megatron and an inference engine in RL of MoE models, small, readable and vetted.

Rooms, left imported by right: `layout` → `families` → `bridge` → `exporter`; `layout` → `config`.
`moeref.megatron` alone imports megatron-core, and nothing here imports it by itself.
"""

from moeref.layout import Layout, LayoutError

__all__ = ["Layout", "LayoutError"]
