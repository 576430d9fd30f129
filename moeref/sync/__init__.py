"""Weight updates of an inference engine as transactions: the new weights entirely, the old ones, or a dead engine."""

from moeref.sync.engine import Colocated, Engine, Receiver, Reverting
from moeref.sync.values import Bucket, Receipt, Refused, SyncError, Update, checksum

__all__ = [
    "Bucket",
    "Colocated",
    "Engine",
    "Receipt",
    "Receiver",
    "Refused",
    "Reverting",
    "SyncError",
    "Update",
    "checksum",
]
