"""What a run costs: memory of each stage and rank, batches, messages between ranks. Arithmetic, without torch."""

from moeref.costs.memory import GIB, Memory, fixes, largest, memory
from moeref.costs.states import States, states
from moeref.costs.training import CostError, Training

__all__ = ["GIB", "CostError", "Memory", "States", "Training", "fixes", "largest", "memory", "states"]
