"""Commands of the README and the docs that judge cells, as they stand there: minutes, so in `nox -s commands`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fenced import ROOT, commands, in_shell, words

pytestmark = [pytest.mark.long, pytest.mark.ranks]
#: Pages whose commands run in test_docs, and those that need several machines.
ELSEWHERE = ("first-dump.md", "compare-runs.md", "results.md", "run-on-gpus.md")
DUMP = (ROOT / "docs/tutorial/first-dump.md").read_text(encoding="utf-8")


def judging(text: str) -> list[str]:
    """The commands of a page that judge cells."""
    found = [words(line)[:2] for line in commands(text)]
    begin = (["moeref-conformance", "run"], ["moeref-conformance", "smoke"], ["pytest", "--pyargs"])
    return [line for line, said in zip(commands(text), found, strict=True) if said in begin]


PAGES = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts and page.name not in ELSEWHERE]
LINES = sorted({line for page in (ROOT / "README.md", *PAGES) for line in judging(page.read_text(encoding="utf-8"))})


def before(line: str) -> list[str]:
    """What must be there first: a recorded run, as the tutorial makes one, or a package with an adapter."""
    if "dump:dump" in line:
        return [line for line in commands(DUMP) if " inputs " in line or line.startswith("torchrun")]
    return ["mkdir mypackage", "cp docs/examples/first_adapter.py mypackage/adapter.py"] if "mypackage" in line else []


@pytest.mark.parametrize("line", LINES)
def test_runs_as_written(line: str, tmp_path: Path) -> None:
    for each in (*before(line), line):
        done = in_shell(each, tmp_path, ("docs", "tests"))
        wanted = 1 if "faulty:" in each else 0
        assert done.returncode == wanted, f"{each}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
