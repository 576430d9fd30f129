"""The audit of weights: whether two models are equal bit for bit and, where not, what happened to each tensor.

Every byte of both is read and hashed. An earlier `Manifest` can stand for a model that is no longer there.
"""

from moeref.audit.compare import compare
from moeref.audit.manifest import AuditError, Fingerprint, Manifest
from moeref.audit.report import Finding, Report
from moeref.audit.source import read

__all__ = ["AuditError", "Finding", "Fingerprint", "Manifest", "Report", "compare", "read"]
