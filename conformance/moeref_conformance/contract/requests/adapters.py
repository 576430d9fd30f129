"""What the facet `adapters` is asked for."""

from __future__ import annotations

from moeref_conformance.contract.cells import ADAPTER_MODULES, Cell, Claims

RANK = 4
#: Not the rank, nor twice it: a scale of 1.5.
ALPHA = 6.0
SCALE = ALPHA / RANK
#: The steps, and the rate of each. A lora_A is moved by the second one alone, which is so long that what fp32 rounds
#: in the sum is small beside it.
RATES = {"step1": 0.5, "step2": 4.0}
#: When adapters are sent: before a step, after one and after two, and after a stream of merged weights.
PHASES = ("fresh", "step1", "step2", "again")
#: When they are sent of a target that saves them: before the save, after one more step, when they are restored, and
#: after the same step.
RESUMED = ("saved", "on", "restored", "resumed")
#: What begins the names of the streams of weights behind the last of them.
BEHIND = "resumed_"
#: The rate of these steps.
RESUMED_RATE = 4.0
#: When logits are asked for: before a step, after two, of the base, and after a stream of merged weights.
LOGITS = ("fresh", "trained", "base", "after")
#: A linear of its own in Megatron, too, which could have an adapter and is not always asked for.
NOT_ASKED = "o_proj"


def modules(claims: Claims, cell: Cell) -> tuple[str, ...]:
    """The ends of the names of linears that get adapters: all that can, but for NOT_ASKED in cells of fused experts."""
    left_out = {NOT_ASKED} if cell.expert_format != "per_expert" else set()
    return tuple(name for name in ADAPTER_MODULES if name in claims.adapter_modules - left_out)
