"""What people read: one HTML page, a Markdown summary, JUnit XML and a badge, all from one `Results`."""

from __future__ import annotations

from pathlib import Path

from moeref_conformance.contract.results import Results
from moeref_conformance.report import badge, html, junit, markdown


def write_all(results: Results, out: Path) -> Path:
    """Write the page, the summary, `junit.xml`, `badge.json` and `badge.svg` into `out`; gives the path of the page."""
    out.mkdir(parents=True, exist_ok=True)
    renders = {"report.html": html.render, "summary.md": markdown.render, "junit.xml": junit.render}
    for name, render in (renders | {"badge.json": badge.render, "badge.svg": badge.picture}).items():
        # The name of a file, in the command that repeats a rule, may hold lone surrogates.
        (out / name).write_text(render(results), encoding="utf-8", errors="backslashreplace")
    return out / "report.html"
