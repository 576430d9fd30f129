"""A run on the terminal: a progress bar, or without a terminal a line for each cell; then the slowest cells."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.results import Verdict

#: Untested comes after pass: as in the headline, a cell with some untested rules can pass.
WORST = ("error", "fail", "xpass", "xfail", "pass", "untested", "unclaimed", "disabled")
#: As many of the slowest cells are listed at the end of a run that has more.
SLOWEST = 20


class Progress:
    """A context manager that the runner calls at the beginning and end of every cell, from any thread.

    Rules `apart` decide nothing: where they fail, they are named, and the cell is as good as without them.
    """

    def __init__(self, cells: int, console: Console | None = None, apart: frozenset[str] = frozenset()) -> None:
        self.cells, self.done, self.failures, self._apart = cells, 0, 0, apart
        self.console = console or Console(stderr=True)
        self._running: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._bar = Bar(
            TextColumn("{task.fields[failures]}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=cells, failures="")

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self.done > SLOWEST:
            slowest = sorted(self._seconds.items(), key=lambda cell: cell[1], reverse=True)[:SLOWEST]
            lines = [f"the slowest {SLOWEST} of {self.done} cells:", *(f"{s:8.1f} s  {cell}" for cell, s in slowest)]
            self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def __call__(self, event: str, cell: Cell, verdicts: list[Verdict]) -> None:
        """Show one event, "begin" or "end"."""
        with self._lock:
            if event == "begin":
                self._running[cell.id] = time.monotonic()
            else:
                self.done += 1
                self._report(cell, verdicts, time.monotonic() - self._running.pop(cell.id, time.monotonic()))
            self._bar.update(
                self._task,
                completed=self.done,
                description=escape(", ".join(self._running)),
                failures=f"[bold red]✗ {self.failures}[/]" if self.failures else "[green]✓[/]",
            )

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _report(self, cell: Cell, verdicts: list[Verdict], seconds: float) -> None:
        self._seconds[cell.id] = seconds
        red = {v.rule for v in verdicts if v.status in ("fail", "xpass")}
        advice = sorted(red & self._apart)
        worst = min((v.status for v in verdicts if v.rule not in advice), key=WORST.index, default="disabled")
        bad = [v.rule for v in verdicts if v.status == "error" or v.rule in red - self._apart]
        self.failures += bool(bad)
        if bad or not self.console.is_terminal:
            tail = f" {', '.join(bad)}" if bad else ""
            tail += f", not followed: {', '.join(advice)}" if advice else ""
            style = "red" if bad else None
            text = f"{self.done:>4}/{self.cells} {worst:9} {cell.id}{tail} ({seconds:.1f} s)"
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
