"""The exporter: a plan made from names and layout alone, a stream of full Hugging Face tensors, and buckets of them.

docs/explanation/export.md follows one tensor through the modules of this package.
"""

from moeref.exporter.buckets import Bucket, buckets, read
from moeref.exporter.cuts import BucketError, Entry
from moeref.exporter.lending import Lender
from moeref.exporter.plan import ExportError, Plan, Step
from moeref.exporter.quantise import quantised
from moeref.exporter.shared import SharedBuffer
from moeref.exporter.stream import Stream, export
from moeref.exporter.units import unit_of

__all__ = [
    "Bucket",
    "BucketError",
    "Entry",
    "ExportError",
    "Lender",
    "Plan",
    "SharedBuffer",
    "Step",
    "Stream",
    "buckets",
    "export",
    "quantised",
    "read",
    "unit_of",
]
