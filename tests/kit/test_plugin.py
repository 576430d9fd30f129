"""The pytest plugin, in pytest runs of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

pytest_plugins = ["pytester"]

STATIC = """
schema = 1
name = "toy"
layouts = { one = {}, big = { tp = 8, ep = 16, etp = 1 } }
[[grid]]
layout = ["one", "big"]
backend = ["static"]
family = ["qwen3_moe", "glm4_moe"]
"""
ADAPTER = """
from contextlib import contextmanager
from types import SimpleNamespace
from moeref_conformance.contract.api import Claims, Info

class Target:
    info = Info(name="adapter", version="1")
    claims = Claims(facets=frozenset({"names"}), families=frozenset({"qwen3_moe"}), backends=frozenset({"static"}))

    @contextmanager
    def open(self, cell, world):
        with open("opened.txt", "a") as file:
            print(cell.id, file=file)
        yield SimpleNamespace(names=SimpleNamespace(table=lambda rank: []), export=None, forward=None)
"""


@pytest.fixture
def kit(pytester, monkeypatch):
    """Runs pytest in an empty folder with the plugin, a matrix of static cells and an adapter that knows no names."""
    import importlib.metadata

    pytester.makefile(".toml", toy=STATIC)
    pytester.makepyfile(adapter=ADAPTER)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2] / 'conformance'}:{pytester.path}")
    installed = any(e.name == "moeref_conformance" for e in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "moeref_conformance.plugin"]

    def go(*arguments, fresh=False):
        command = [*plugin, "-p", "no:cacheprovider", "--strict-markers", *arguments]
        if fresh:
            return pytester.runpytest_subprocess(*command)
        program = f"import pytest\nraise SystemExit(pytest.main({command}))"
        done = warm.run(program, cwd=pytester.path, path=[str(pytester.path)], forget=["moeref_conformance"])
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    return go


def test_statuses_reach_pytest_and_cells_run_once(kit, pytester):
    """In a project whose tests must not warn; what packages say as they are imported is no failure of the target."""
    pytester.makeini("[pytest]\nfilterwarnings = error")
    pytester.makeconftest("import warnings\ndef pytest_runtest_call():\n    warnings.warn('said by a package')\n")
    arguments = ("--pyargs", "moeref_conformance", "--target", "adapter:Target", "--matrix", "toy.toml", "-rs")
    result = kit(*arguments, "--rule", "NAM-001", "--rule", "NAM-002")
    assert "said by a package" not in result.stdout.str()
    outcomes = result.parseoutcomes()
    # RUN-001, which every rule requires, and the two that are asked for, in four cells of which two are claimed.
    assert outcomes["skipped"] == 6
    assert outcomes["failed"] + outcomes.get("passed", 0) == 6
    result.stdout.fnmatch_lines(["*FAIL NAM-001 in qwen3_moe/one/static*", "*family=glm4_moe is not claimed*"])
    result.stdout.fnmatch_lines(["repeat: moeref-conformance run --target adapter:Target *--rule NAM-001"])
    assert sorted((pytester.path / "opened.txt").read_text().split()) == [
        "qwen3_moe/big/static",
        "qwen3_moe/one/static",
    ]


def test_an_adapter_of_the_folder_is_found_as_by_the_command(kit, pytester, monkeypatch):
    """The program `pytest`, unlike `python -m pytest`, does not import from the current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "conformance"))
    other = pytester.mkpydir("moeref")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "moeref_conformance"]
    done = pytester.run(*command, "--target", "adapter:Target", "--matrix", "toy.toml", "--collect-only", "-q")
    done.stdout.fnmatch_lines(["*test_rule?qwen3_moe/one/static-NAM-001?*"])
    done.stdout.fnmatch_lines([f"*moeref is that of this folder ({other}), not the installed one (*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "*pytest --pyargs moeref_conformance --target*"),
        (("--target", "morf"), "*unknown target 'morf'*"),
        (("--target", "adapter:Target", "--matrix", "tooy"), "*no matrix 'tooy'*"),
    ],
)
def test_bad_input_is_a_usage_error(kit, arguments, message):
    result = kit("--pyargs", "moeref_conformance", *arguments)
    assert result.ret != 0
    (result.stderr if result.stderr.lines else result.stdout).fnmatch_lines([message])


def test_other_runs_are_left_alone(kit, pytester):
    """Somebody else's `--target` works, nothing heavy is imported, and the markers are there."""
    pytester.makeconftest("def pytest_addoption(parser):\n    parser.addoption('--target')\n")
    pytester.makepyfile(
        test_own="""
        import sys
        import pytest

        @pytest.mark.rule("EXP-002")
        def test_own(request):
            assert request.config.getoption("--target") == "mine"
            assert not {"torch", "megatron", "transformers", "rich", "jinja2"} & set(sys.modules)
        """
    )
    kit("--target", "mine", "test_own.py", fresh=True).assert_outcomes(passed=1)


def test_one_test_a_rule_and_cell_cpu_or_gpu_by_where_it_runs(kit, pytester):
    more = '[[grid]]\nlayout = ["one"]\nbackend = ["gloo", "gloo-cuda", "nccl"]\nfamily = ["qwen3_moe"]\n'
    pytester.makefile(".toml", both=STATIC + more)
    named = ("--pyargs", "moeref_conformance", "--target", "adapter:Target", "--matrix", "both.toml", "--collect-only")
    results = {mark: kit(*named, "-q", "-m", mark) for mark in ("cpu", "gpu")}
    results["cpu"].stdout.fnmatch_lines(
        ["*test_rule?qwen3_moe/one/static-NAM-001?*", "*test_rule?glm4_moe/big/static-NAM-004?*"]
    )
    backends = {}
    for mark, result in results.items():
        listed = [line for line in result.stdout.lines if "test_rule[" in line]
        backends[mark] = {line.split("-")[0].rpartition("/")[2] for line in listed}
    assert backends == {"cpu": {"static", "gloo"}, "gpu": {"gloo", "nccl"}}  # gloo-cuda has a hyphen


HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in {hidden!r} else real(name, *more)
sys.meta_path.insert(0, Hidden())
"""


def test_without_the_extra_kit_one_sentence_says_what_to_install(kit, pytester):
    """As `pip install moeref` leaves it; static cells do not need megatron-core."""
    pytester.makepyfile(hide=HIDE.format(hidden=("transformers", "jinja2")))
    named = ("--pyargs", "moeref_conformance", "--target", "adapter:Target", "--matrix", "toy.toml")
    result = kit("-p", "hide", *named)
    said = "\n".join([*result.stderr.lines, *result.stdout.lines])
    assert "transformers and jinja2 are not installed here; pip install 'moeref[kit]' brings what is needed" in said
    assert "Traceback" not in said


def test_a_missing_test_dependency_is_one_sentence(tmp_path):
    root = Path(__file__).parents[2]
    program = HIDE.format(hidden=("hypothesis",)) + (
        "import pytest\nraise SystemExit(pytest.main(['-p', 'no:hypothesispytest', 'tests/unit/test_layout.py', '-q']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    pip = "pip install -e '.[kit]' --group test (pip 25.1 or newer)"
    said = f"the tests need hypothesis, which is not installed here: {pip}"
    assert (done.stdout + done.stderr).strip().splitlines() == [f"ERROR: {said}"]
