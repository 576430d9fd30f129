"""The exporter: a plan made from names and layout alone, and a stream of full Hugging Face tensors."""

from moeref.exporter.plan import ExportError, Plan, Step
from moeref.exporter.stream import Stream, export

__all__ = ["ExportError", "Plan", "Step", "Stream", "export"]
