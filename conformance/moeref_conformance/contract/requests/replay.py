"""The forwards and training steps that the facet `replay` is asked for."""

from __future__ import annotations

#: Phases of each mode, in order; those that are named for a route set are judged by it.
PHASES = {
    "R3": ("replay-a", "native-between", "step-a", "recompute-b", "native-after"),
    "R2": ("record", "replay", "changed-native", "recompute", "record-changed", "step-changed"),
}
