"""How the kit changes a model between exports, so that the next export must differ or fail."""

from __future__ import annotations

#: Exact in every floating dtype, and changes sign, so that a zero or an absolute value cannot hide a stale tensor.
CHANGE = -0.5
#: Name of a module with a parameter or a buffer that is in no names table; an export must refuse it.
UNMAPPED = "kit_unmapped"
