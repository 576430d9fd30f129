"""What a fault is, and all of them by id."""

from moeref_conformance.targets.faults import export, loading, names, stream
from moeref_conformance.targets.faults.base import Edit, Fault

FAULTS: dict[str, Fault] = {
    fault.id: fault for fault in (*names.FAULTS, *loading.FAULTS, *export.FAULTS, *stream.FAULTS)
}

__all__ = ["FAULTS", "Edit", "Fault"]
