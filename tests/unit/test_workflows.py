"""GitHub's files: actions are pinned, inputs reach the shell as variables only, and the commands exist."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from fenced import ROOT, nox_sessions
from moeref_conformance.cli import _parser

WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PAGE = (ROOT / "docs" / "how-to" / "run-in-ci.md").read_text(encoding="utf-8")


def _read(name: str) -> Any:
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))


def _steps(name: str) -> list[dict[str, Any]]:
    return [step for job in _read(name)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned(name: str) -> None:
    uses = re.findall(r"uses: (.+)", WORKFLOWS[name].read_text(encoding="utf-8"))
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []
    assert _read(name)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nothing_reaches_the_shell_as_text(name: str) -> None:
    scripts = [step["run"] for step in _steps(name) if "run" in step]
    assert scripts
    assert [script for script in scripts if "${{" in script] == []


def test_every_input_is_described() -> None:
    inputs = _read("conformance")[True]["workflow_call"]["inputs"]  # YAML 1.1 reads `on` as true
    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == list(inputs)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"cell": [], "known": None, "profile": []}),
        ({"CELLS": "a\nb\n", "PROFILE": "weights logits"}, {"cell": ["a", "b"], "profile": ["weights", "logits"]}),
        (
            {"CELLS": "qwen3_moe/* moe", "KNOWN": "my known.toml"},
            {"cell": ["qwen3_moe/*", "moe"], "known": Path("my known.toml")},
        ),
    ],
)
def test_the_command_takes_the_inputs(tmp_path: Path, given: dict[str, str], wanted: dict[str, Any]) -> None:
    """The step's script, run by bash, with a command that writes down its arguments."""
    (step,) = [step for step in _steps("conformance") if step.get("name") == "Judge"]
    stub = tmp_path / "moeref-conformance"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > arguments\n', encoding="utf-8")
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(tmp_path / "output")}
    inputs = {"TARGET": "a.b:c", "MATRIX": "smoke", "PYTHON": "3.12", "CELLS": "", "KNOWN": "", "PROFILE": "", **given}
    subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env={**env, **inputs}, check=True)
    options = _parser().parse_args((tmp_path / "arguments").read_text(encoding="utf-8").splitlines())
    assert {name: getattr(options, name) for name in wanted} == wanted
    assert (options.target, options.matrix) == ("a.b:c", "smoke")
    assert (tmp_path / "output").read_text(encoding="utf-8") == "name=conformance-a.b-c-smoke-3.12\n"


def test_own_workflow_runs_what_exists() -> None:
    scripts = "\n".join(step["run"] for step in _steps("ci") if "run" in step)
    assert {"docs"} == set(re.findall(r"nox -s (\w+)", scripts)) <= nox_sessions()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert ".ci/run" in scripts
