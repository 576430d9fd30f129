"""Owns the one exception of the layout package."""


class LayoutError(ValueError):
    """A layout that megatron-core would refuse, or would accept and build wrongly. The message names the numbers."""
