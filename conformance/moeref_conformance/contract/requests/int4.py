"""Names and sizes of the experts that a checkpoint has in INT4."""

from __future__ import annotations

#: What the names of a weight's three tensors end with.
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
#: Columns of a group. Experts have 40 and 56, of which an ETP rank's half ends inside of a group and of a word.
GROUP = 8
