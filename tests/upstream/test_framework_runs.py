"""Readers of frameworks' configurations against Megatron-LM's own parser, checks and config class."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeref.check.readers import FORMATS
from tests import warm
from tests.upstream import framework_runs

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron-core 0.16 is published without megatron.training", allow_module_level=True)


@pytest.fixture(scope="module")
def process() -> Iterator[warm.Prepared]:
    """Stand-ins for Transformer Engine and CUDA, and what a run needs of Megatron-LM: for programs in forks of it."""
    program = (
        "from tests.upstream import megatron_arguments\n"
        "megatron_arguments.stand_in()\n"
        "from megatron.training import argument_utils, arguments\n"
    )
    # megatron-core is imported anew, after the kit's substitutions.
    forget = ["megatron", "moeref", "moeref_conformance", "tests"]
    with warm.prepare(program, cwd=ROOT, path=[str(ROOT)], forget=forget) as prepared:
        yield prepared


def judged(process: warm.Prepared, framework: str, before: str = "") -> warm.Done:
    """What `python -m tests.upstream.framework_runs` says of a framework; `before` may spoil it."""
    main = f"from tests.upstream import framework_runs\n{before}\nraise SystemExit(framework_runs.main({framework!r}))"
    return process.run(main, cwd=ROOT)


@pytest.mark.parametrize("framework", FORMATS)
def test_published_runs_get_the_verdict_of_real_construction(framework: str, process: warm.Prepared) -> None:
    done = judged(process, framework)
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
def test_a_reader_that_forgets_something_is_found(before: str, says: str, process: warm.Prepared) -> None:
    done = judged(process, "slime", before)
    assert done.returncode == 1, done.stderr[-3000:]
    assert says in done.stdout


def test_the_table_of_arguments_is_the_parser_s(process: warm.Prepared) -> None:
    main = "import runpy\nrunpy.run_module('tests.upstream.megatron_arguments', run_name='__main__')"
    done = process.run(main, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    file = ROOT / "moeref/check/readers/megatron_arguments.json"
    assert done.stdout == file.read_text(encoding="utf-8"), "write the output of the command into the file"
