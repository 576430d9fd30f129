"""What a run shows while it goes, and at its end."""

from __future__ import annotations

import io
import time

import pytest
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.report.progress import SLOWEST, Progress
from rich.console import Console


def shown(cells: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is printed of a run whose cell number n takes n seconds."""
    out, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress(cells, Console(file=out, width=100)) as progress:
        for n in range(cells):
            cell = Cell(family="toy", layout_name=f"n{n}", layout=Layout())
            progress("begin", cell, [])
            clock[0] += n
            progress("end", cell, [])
    return out.getvalue()


def test_the_slowest_cells_come_last_slowest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(SLOWEST + 2, monkeypatch).splitlines()
    assert lines[-SLOWEST - 1] == f"the slowest {SLOWEST} of {SLOWEST + 2} cells:"
    assert lines[-SLOWEST] == f"{SLOWEST + 1:8.1f} s  toy/n{SLOWEST + 1}/gloo"
    assert lines[-1] == "     2.0 s  toy/n2/gloo"


def test_a_short_run_has_told_them_already(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "slowest" not in shown(SLOWEST, monkeypatch)
