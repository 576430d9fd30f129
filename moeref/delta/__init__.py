"""Deltas in Hugging Face names: what changed between two versions of the weights, bit for bit, in bounded memory.

`Sender` and `Receiver` are the two ends. `Delta` makes one delta from any two iterators of (Hugging Face name, tensor).
"""

from moeref.delta.apply import Receiver, check
from moeref.delta.encode import Delta, Sender
from moeref.delta.errors import DeltaError
from moeref.delta.messages import File, Reader, save
from moeref.delta.state import Fingerprint, State

__all__ = ["Delta", "DeltaError", "File", "Fingerprint", "Reader", "Receiver", "Sender", "State", "check", "save"]
