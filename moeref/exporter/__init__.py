"""The exporter: a plan made from names and layout alone, a stream of full Hugging Face tensors, and buckets of them."""

from moeref.exporter.buckets import Bucket, BucketError, Entry, buckets, read
from moeref.exporter.plan import ExportError, Plan, Step
from moeref.exporter.stream import Stream, export
from moeref.exporter.units import unit_of

__all__ = [
    "Bucket",
    "BucketError",
    "Entry",
    "ExportError",
    "Plan",
    "Step",
    "Stream",
    "buckets",
    "export",
    "read",
    "unit_of",
]
