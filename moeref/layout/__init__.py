"""The geometry of a run: ranks and coordinates, process groups, pipeline stages, experts, parts of sequences.

Nothing here needs torch or megatron-core. `tests/upstream` compares every answer with megatron-core's own functions.
"""

from moeref.layout import sequence
from moeref.layout.errors import LayoutError
from moeref.layout.grid import Coords
from moeref.layout.layout import Layout
from moeref.layout.stages import Stages

__all__ = ["Coords", "Layout", "LayoutError", "Stages", "sequence"]
