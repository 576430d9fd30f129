"""What a rank does with a session: one module a facet, each with its `FACET`.

A step compares nothing with an expected value: judges do. Where it records only what changed, it compares tensors or
settings of the target with each other.
"""
