"""Cells and rules to verdicts."""
