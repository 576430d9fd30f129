"""What a run shows while it goes, and at its end."""

from __future__ import annotations

import io
import time

import pytest
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.results import Verdict
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


def test_a_recommendation_that_is_not_followed_fails_no_cell() -> None:
    out = io.StringIO()
    cell = Cell(family="toy", layout_name="n", layout=Layout())
    verdicts = [Verdict(cell=cell.id, rule=rule, status=s) for rule, s in (("AAA-001", "pass"), ("AAA-002", "fail"))]
    with Progress(2, Console(file=out, width=100), apart=frozenset({"AAA-002"})) as progress:
        progress("begin", cell, [])
        progress("end", cell, verdicts)
        assert progress.failures == 0
        progress("begin", cell, [])
        progress("end", cell, [*verdicts, Verdict(cell=cell.id, rule="AAA-003", status="fail")])
        assert progress.failures == 1
    first, second = out.getvalue().splitlines()
    assert first == "   1/2 pass      toy/n/gloo, not followed: AAA-002 (0.0 s)"
    assert second == "   2/2 fail      toy/n/gloo AAA-003, not followed: AAA-002 (0.0 s)"


def test_a_short_run_has_told_them_already(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "slowest" not in shown(SLOWEST, monkeypatch)
