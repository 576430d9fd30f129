"""A target for a world: moeref, whose training step has megatron-core's auxiliary loss, whole."""

from __future__ import annotations

from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.steps import balanced, stepping
from moeref_conformance.selftest.faulty import FaultyTarget

BALANCED = Fault(
    id="balanced",
    bug="none: the auxiliary loss as megatron-core has it",
    rules=(),
    cell=cell("qwen3_moe", "tp2"),
    edits=stepping(balanced(lambda layout: 1.0)),
    one_rank=True,
)


def target() -> FaultyTarget:
    return FaultyTarget(BALANCED)
