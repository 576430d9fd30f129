"""What a run costs: memory of each stage and rank, batches, messages between ranks. Arithmetic, without torch."""

from moeref.costs.activations import Recompute, Shape, activations
from moeref.costs.memory import GIB, Memory, Run, highest, largest
from moeref.costs.states import States, states
from moeref.costs.training import CostError, Training

__all__ = [
    "GIB",
    "CostError",
    "Memory",
    "Recompute",
    "Run",
    "Shape",
    "States",
    "Training",
    "activations",
    "highest",
    "largest",
    "states",
]
