"""The exception of this package."""


class LayoutError(ValueError):
    """A layout that megatron-core refuses, or accepts and builds wrongly. The message names the numbers."""
