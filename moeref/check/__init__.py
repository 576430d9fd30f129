"""Preflight: whether a model, layout, dispatcher and replay mode work together, and which settings Megatron gets."""

from moeref.check.report import CheckError, Problem, Report, UnmappedError
from moeref.check.run import check, model_of
from moeref.check.runfile import RunFile, check_run, read_run_file
from moeref.check.splits import Split, splits

__all__ = [
    "CheckError",
    "Problem",
    "Report",
    "RunFile",
    "Split",
    "UnmappedError",
    "check",
    "check_run",
    "model_of",
    "read_run_file",
    "splits",
]
