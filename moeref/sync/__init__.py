"""Weight updates of an inference engine as transactions that end in the new weights, the old ones or a dead engine."""

from moeref.sync.engine import Colocated, Engine, Intake, Reverting
from moeref.sync.states import State, Timeouts
from moeref.sync.values import Bucket, Receipt, Refused, SyncError, Update, checksum
from moeref.sync.weights import EngineDead, Synced, UpdateFailed, WeightSync

__all__ = [
    "Bucket",
    "Colocated",
    "Engine",
    "EngineDead",
    "Intake",
    "Receipt",
    "Refused",
    "Reverting",
    "State",
    "SyncError",
    "Synced",
    "Timeouts",
    "Update",
    "UpdateFailed",
    "WeightSync",
    "checksum",
]
