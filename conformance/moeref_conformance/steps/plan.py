"""Facet `plan`: what an export would send, made without a module. Ranks compare `Export.plan` with the stream."""

from __future__ import annotations

from moeref_conformance.contract.api import Plan, TensorMeta
from moeref_conformance.steps.facet import Context, Facet, Static, Step, checked_rows


def tensors(plan: Plan, context: Context) -> tuple[TensorMeta, ...]:
    """The whole plan, in the target's order."""
    return tuple(checked_rows(plan.tensors(), TensorMeta))


FACET = Facet(name="plan", protocol=Plan, steps=(Step(name="plan", ask=tensors, static=Static.ONCE, in_ranks=False),))
