"""The forwards and training steps that the facet `replay` is asked for."""

from __future__ import annotations

#: What the name of a set of routes begins with that has no missing row.
WHOLE = "whole-"
#: The phase that replays the beginning of the first microbatch alone.
SHORTER = "shorter-a"
#: The phase that replays a forward once more, behind steps under other routes.
AGAIN = "again-a"
#: Phases of each mode, in order. A phase that ends in `-a` or `-b` takes the route set of that name.
PHASES = {
    "R3": ("native-before", "replay-a", "native-between", SHORTER, "step-a", "recompute-b", AGAIN, "native-after"),
    "R2": ("record", "replay", "changed-native", "recompute", "record-changed", "step-changed"),
}
#: Phases in which all data-parallel replicas take the same rows. In the others each takes `topology.replica_rows`.
SHARED = frozenset({"native-before", "replay-a", "native-between", SHORTER, AGAIN, "native-after", "changed-native"})
