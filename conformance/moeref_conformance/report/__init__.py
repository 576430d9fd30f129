"""What people read: one HTML page, a Markdown summary, JUnit XML and a badge, all from one `Results`."""

from __future__ import annotations

from pathlib import Path

from moeref_conformance.contract.results import Results
from moeref_conformance.report import badge, html, junit, markdown


def write_all(results: Results, out: Path) -> Path:
    """Write `report.html`, `summary.md`, `junit.xml` and `badge.json` into `out`; gives the path of the page."""
    out.mkdir(parents=True, exist_ok=True)
    renders = {"report.html": html, "summary.md": markdown, "junit.xml": junit, "badge.json": badge}
    for name, module in renders.items():
        # The name of a file, in the command that repeats a rule, may hold lone surrogates.
        (out / name).write_text(module.render(results), encoding="utf-8", errors="backslashreplace")
    return out / "report.html"
