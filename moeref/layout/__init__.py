"""Owns the geometry of a run: ranks and coordinates, groups, pipeline stages, experts, sequences, impossible layouts.

Nothing here needs torch or megatron-core; the upstream tests hold every answer against megatron-core's own functions.
"""

from moeref.layout import sequence
from moeref.layout.errors import LayoutError
from moeref.layout.grid import Coords
from moeref.layout.layout import Layout
from moeref.layout.stages import Stages

__all__ = ["Coords", "Layout", "LayoutError", "Stages", "sequence"]
