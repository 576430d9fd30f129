"""The error that this package raises."""

from __future__ import annotations


class DeltaError(ValueError):
    """A delta cannot be made, read or applied. Nothing was written unless the message says so."""
