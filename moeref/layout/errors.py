"""The exceptions of this package."""


class LayoutError(ValueError):
    """A layout that megatron-core refuses, or accepts and builds wrongly. The message names the numbers."""


class UnmappedLayoutError(LayoutError):
    """A layout that megatron-core builds and moeref does not map."""
