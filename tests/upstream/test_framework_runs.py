"""Readers of frameworks' configurations against Megatron-LM's own parser, checks and config class."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeref.check.readers import FORMATS
from tests.upstream import framework_runs

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
pytest.importorskip("megatron.training", reason="megatron-core 0.16 is published without megatron.training")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process at the root of the repository."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "conformance")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("framework", FORMATS)
def test_published_runs_get_the_verdict_of_real_construction(framework: str) -> None:
    done = run("-m", "tests.upstream.framework_runs", framework)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.endswith((": works", ": refused", ": unknown"))]
    assert len(lines) == len(framework_runs.facts(framework))


@pytest.mark.parametrize(
    ("before", "says"),
    [
        # A derived value, a default and a refusal that the reader does not know.
        ("from moeref.check.readers import megatron_lm\nmegatron_lm._derive_fields = lambda every: None", "WRONG"),
        ("framework_runs.APART = frozenset()", "use_cpu_initialization: "),
        ("from moeref.check.readers import slime\nslime._defaults = lambda arguments: arguments", "WRONG"),
    ],
)
def test_a_reader_that_forgets_something_is_found(before: str, says: str) -> None:
    main = "from tests.upstream import framework_runs\n{}\nraise SystemExit(framework_runs.main('slime'))"
    done = run("-c", main.format(before))
    assert done.returncode == 1, done.stderr[-3000:]
    assert says in done.stdout


def test_the_table_of_arguments_is_the_parser_s() -> None:
    done = run("-m", "tests.upstream.megatron_arguments")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    file = ROOT / "moeref/check/readers/megatron_arguments.json"
    assert done.stdout == file.read_text(encoding="utf-8"), "write the output of the command into the file"
