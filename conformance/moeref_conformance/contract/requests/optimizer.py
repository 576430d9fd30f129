"""The steps that the facet `optimizer` is asked for."""

from __future__ import annotations

from typing import NamedTuple

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.cells import OPTIMIZER_RATE

#: The step at the rate 0. The gradient of the next one differs, so that moments have to outlive it.
STILL = "still"
#: The first step that moves weights, and what begins the names of the tensors that are sent after it.
MOVED, SENT = "moved", "sent"
#: The step at the rate 0 that follows the moved weights in fp32, and what begins the names of answers before it.
TRAINED = "trained"
#: The step at the rate 0 after another load of the checkpoint, where the target takes one.
RELOADED = "reloaded"
#: What begins the names of the logits, and of what is sent, between that load and that step.
LOADED = "loaded"
#: The weights where the optimizer is saved, after its next step, and after the same step of one that was restored.
SAVED, ON, RESUMED = "saved", "on", "resumed"
#: The weights after the first two steps of an optimizer that is made while routers are frozen.
FROZEN = "frozen"
#: By the names of megatron-core's OptimizerConfig; none is a default. With an epsilon as large as gradients, steps show
#: their scale. In most cells the gradient of the first step is shorter than `clip_grad`, and that of the second longer.
SETTINGS = {"adam_beta1": 0.85, "adam_beta2": 0.97, "adam_eps": 3e-5, "weight_decay": 0.3, "clip_grad": 1.95}

#: A schedule, by the names of Megatron-LM's arguments. Steps at its rates hardly move a gradient, and routes less.
SCHEDULE: dict[str, float | str] = {
    "lr": 1e-5,
    "min_lr": 2e-6,
    "lr_warmup_iters": 2,
    "lr_decay_iters": 5,
    "lr_decay_style": "cosine",
}
#: So many steps follow it, the last one past the end of the decay, and from this one of them, from 0, an optimizer goes
#: on from a save for two steps.
SCHEDULED, BROKEN_OFF = 7, 1
#: A schedule of one rate, for an optimizer that is made with SETTINGS too, and what begins the names after its step.
LEVEL: dict[str, float | str] = {
    **SCHEDULE,
    "lr": OPTIMIZER_RATE,
    "min_lr": OPTIMIZER_RATE,
    "lr_warmup_iters": 0,
}
WITH_BOTH = "both"

#: The weights before an offload and after the step that follows it; what was there that is another once all is back.
BEFORE, OFFLOADED, WAS, BACK = "before", "offloaded", "was", "back"

#: What is in a gradient of a step that is to be skipped, by the name of that step.
NOT_FINITE = {"inf": float("inf"), "nan": float("nan")}


class Behind(NamedTuple):
    """A step behind which answers are TRAINED and tensors SENT: its record, what begins names of parameters, in words.

    `moved` begins the names of parameters after it, `before` of those before it.
    """

    record: str
    moved: str
    before: str
    text: str


#: The first step that moves weights, and that of a restored optimizer.
BEHIND = (
    Behind("optimizer", MOVED, STILL, "a step of the optimizer"),
    Behind("optimizer_resumed", RESUMED, SAVED, "a step of a restored optimizer"),
)


def rates(cell: Cell) -> dict[str, float]:
    """The steps in order, and the learning rate of each. Below fp32 two move weights: small steps have to add up."""
    again = {"again": OPTIMIZER_RATE} if cell.dtype != "float32" else {}
    return {STILL: 0.0, MOVED: OPTIMIZER_RATE, **again}


def of_one_microbatch(cell: Cell) -> str:
    """The step whose gradient is that of the first microbatch alone; the others are of all rows.

    In fp32 the one that moves weights, so that experts with tokens in the step before have none in it.
    """
    return MOVED if cell.dtype == "float32" else STILL


def saved_at(cell: Cell) -> float:
    """The rate of the steps before a save. In fp32 gradients are of the loaded weights; elsewhere masters move."""
    return 0.0 if cell.dtype == "float32" else OPTIMIZER_RATE


def is_frozen(name: str) -> bool:
    """Whether this parameter, by its local name, is frozen: those of routers are, as RL of MoE models may keep them."""
    return ".mlp.router." in name
