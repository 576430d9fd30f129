"""What the facet `gradients` is asked for."""

from __future__ import annotations

#: What the name of a gradient begins with that is of the first of two steps.
FIRST = "first-"
