"""What a run costs: memory of each stage and rank, batches, messages between ranks. Arithmetic, without torch."""

from moeref.costs.activations import Recompute, Shape, activations
from moeref.costs.engine import Engine, EngineSide, delta_share, senders
from moeref.costs.memory import GIB, Memory, Run, highest, largest
from moeref.costs.states import States, states
from moeref.costs.traffic import Crossing, Waste, batch_problem, crossings, dispatch_bytes, read_lengths, waste
from moeref.costs.training import CostError, Training

__all__ = [
    "GIB",
    "CostError",
    "Crossing",
    "Engine",
    "EngineSide",
    "Memory",
    "Recompute",
    "Run",
    "Shape",
    "States",
    "Training",
    "Waste",
    "activations",
    "batch_problem",
    "crossings",
    "delta_share",
    "dispatch_bytes",
    "highest",
    "largest",
    "read_lengths",
    "senders",
    "states",
    "waste",
]
