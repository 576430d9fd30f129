"""The one error of this room."""

from __future__ import annotations


class DeltaError(ValueError):
    """A delta that cannot be made, read or applied. Unless it says so, nothing was written."""
