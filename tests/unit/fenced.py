"""Fenced blocks of Markdown files, and a check that the commands in them exist."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from moeref_conformance import cli
from moeref_conformance import resolve as targets
from moeref_conformance.contract import rules
from moeref_conformance.plan import matrix
from safetensors.torch import save_file

from moeref import audit
from moeref import cli as preflight
from tests import warm

ROOT = Path(__file__).parents[2]
#: With the commands of this environment first.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
#: Placeholders for the reader's own targets and files.
PLACEHOLDERS = ("mypackage.adapter:target", "dump:dump")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of `text` in one language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Every line of the `sh` blocks."""
    return [line.strip() for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]


def inline_commands(text: str) -> list[str]:
    """Commands of nox within sentences and tables; `NAME` is the reader's."""
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in re.findall(r"`((?:\.venv/bin/)?nox -s .+?)`", outside) if "NAME" not in line]


def in_shell(line: str, folder: Path, links: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a line as it is typed, in `folder`, with links to what it names of the checkout."""
    for name in links:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(ROOT / name)
    env = {**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False)


def words(command: str) -> list[str]:
    """The last simple command of a line, without its comment."""
    return shlex.split(command.split(" && ")[-1], comments=True)


@functools.cache
def output(*command: str) -> str:
    """The output of `python -m …` in the checkout. AssertionError if it fails."""
    program = (
        f"import os, runpy, sys\nos.environ['COLUMNS'] = '200'\nsys.argv = {list(command)}\n"
        f"runpy.run_module({command[0]!r}, run_name='__main__', alter_sys=True)"
    )
    done = warm.run(program, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)} exits {done.returncode}: {done.stderr}"
    return done.stdout


@functools.cache
def nox_sessions() -> frozenset[str]:
    """The names of all sessions of the noxfile."""
    return frozenset(re.findall(r"^[-*] (.+?)(?: -> .*)?$", output("nox", "--list"), flags=re.MULTILINE))


def check(command: str) -> None:
    """Fail unless the program, command, options, cells, rules and files of a line exist."""
    program, *arguments = words(command)
    match program.rpartition("/")[2]:
        case "nox":
            _check_nox(arguments)
        case "moeref" | "moeref-conformance" as name if arguments[0] == "--completion":
            assert f"_shtab_{name.replace('-', '_')}" in output(name.replace("-", "_"), *arguments[:2])
        case "moeref":
            _check_moeref(arguments)
        case "moeref-conformance":
            _check_kit(arguments)
        case "pytest":
            assert arguments[:2] == ["--pyargs", "moeref_conformance"]  # the plugin adds its options only then
            text = output("pytest", *arguments[:2], "--help")
            assert [option for option in arguments if option.startswith("--") and option not in text] == []
        case "torchrun":
            assert shutil.which("torchrun", path=str(Path(sys.executable).parent))
            _check_paths(arguments)
            if "moeref_conformance" in arguments:
                _check_kit(arguments[arguments.index("moeref_conformance") + 1 :])
        case "pip":
            assert arguments[0] == "install"
            _check_paths(arguments)
        case ".":
            assert arguments == [".venv/bin/activate"]
        case other:
            raise AssertionError(f"{other}: no check knows this program ({command})")


def _check_nox(arguments: list[str]) -> None:
    assert arguments[0] == "-s"
    sessions = arguments[1 : arguments.index("--")] if "--" in arguments else arguments[1:]
    options = {word for word in sessions if word.startswith("-")}
    assert options <= set(re.findall(r"--[\w-]+", output("nox", "--help") if options else ""))
    assert set(sessions) - options <= nox_sessions()
    _check_paths(arguments)
    given = arguments[len(sessions) + 2 :]
    if sessions[0] == "conformance-gpu":
        _check_kit(["run", "--target", "moeref", "--matrix", "gpu", *given])
    if sessions[0].startswith("peers(") and not {"--shards", "--scripts", "--bench"} & set(given):
        _check_kit(["run", "--target", "moeref", "--matrix", "peers", *given])
    if "-k" in given:
        chosen = set(given[given.index("-k") + 1].split()) - {"and", "or", "not"}
        assert {word for word in chosen if not any(word in name for name in _tests())} == set()


@functools.cache
def _tests() -> frozenset[str]:
    """The names of all tests and of their files."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    named = (re.findall(r"^ *def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE) for file in files)
    return frozenset({file.name for file in files}.union(*named))


@contextlib.contextmanager
def _checkpoints() -> Iterator[None]:
    """A folder with the checkpoints and the manifest that pages name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in ("published", "exported", "step-7", "again", "from-distributed"):
            Path("checkpoints", name).mkdir(parents=True)
            save_file({"model.norm.weight": torch.ones(4)}, Path("checkpoints", name, "model.safetensors"))
        audit.read("checkpoints/published").save("published.json")
        yield


def _check_moeref(arguments: list[str]) -> None:
    try:
        preflight._parser().parse_args(arguments)
    except SystemExit as error:
        raise AssertionError(f"moeref {shlex.join(arguments)}: not accepted") from error
    if arguments[0] == "convert":  # its commands run in test_shard_folders, in the order of the page
        return
    with _checkpoints() if arguments[0] == "audit" else contextlib.nullcontext():
        assert preflight.main(arguments) in (0, 1)


def _check_kit(arguments: list[str]) -> None:
    try:
        options = vars(cli._parser().parse_args(arguments))
    except SystemExit as error:
        raise AssertionError(f"moeref-conformance {shlex.join(arguments)}: not accepted") from error
    if "matrix" in options:
        matrix.load(options["matrix"]).select(options["cell"])
        rules.select(options.get("rule", []))  # some commands judge nothing
    if options.get("target") and options["target"] not in PLACEHOLDERS:
        targets.resolve(options["target"])
    if arguments[0] in ("init", "list"):  # no cell runs
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            assert cli.main(arguments) == 0


def _check_paths(arguments: list[str]) -> None:
    """Fail if an argument names a file that does not exist."""
    named = [a for a in arguments if a.endswith((".py", ".txt", ".toml"))]
    assert [path for path in named if not (ROOT / path).is_file()] == []
