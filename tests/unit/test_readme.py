"""README.md names only what exists: commands, options and Python; CI runs the commands that it gives."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import families_table
import pytest
import yaml
from fenced import ROOT, blocks, check, commands, inline_commands, nox_sessions, words
from moeref_conformance.contract.rules import load_rules
from transformers import Qwen3MoeConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


COMMANDS = commands(README)
FIRST_TWO = [line for line in COMMANDS if line.startswith("python3.12 ")]
PYTHON, PYTHON_ON_RANKS, PYTHON_OF_BUCKETS = blocks(README, "python")


def test_the_two_commands_are_one_line_each_and_bring_their_tools() -> None:
    assert [words(line)[-1] for line in FIRST_TWO] == ["conformance", "tests"]
    for line in FIRST_TWO:
        venv, pip, nox = line.split(" && ")
        assert shlex.split(venv) == ["python3.12", "-m", "venv", ".venv"]
        assert shlex.split(pip) == [".venv/bin/pip", "install", "-q", "-c", "constraints/py312.txt", "nox[uv]"]
        assert shlex.split(nox)[0] == ".venv/bin/nox"


def test_constraints_pin_every_tool_of_the_two_commands() -> None:
    pins = (ROOT / "constraints" / "py312.txt").read_text(encoding="utf-8").splitlines()
    names = {pin.partition("==")[0] for pin in pins if not pin.startswith("#")}
    assert all("==" in pin for pin in pins if not pin.startswith("#"))
    assert {"nox", "uv", "torch", "megatron-core", "transformers", "pytest", "hatchling"} <= names


def test_ci_runs_the_test_command_as_readme_has_it() -> None:
    (pattern,) = re.findall(r"^tests=\$\(grep -E '(.+)' README\.md\)", CI, flags=re.MULTILINE)
    assert [line for line in README.splitlines() if re.search(pattern, line)] == FIRST_TWO[1:]
    assert 'bash -euo pipefail -c "$tests"' in CI


def test_ci_runs_sessions_that_exist() -> None:
    (named,) = re.findall(r"^\.venv/bin/nox -s (.+)$", CI, flags=re.MULTILINE)
    assert set(named.split()) <= nox_sessions()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_something_that_exists(command: str) -> None:
    check(command)


@pytest.mark.parametrize("path", re.findall(r"\]\(([^):]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = re.findall(r'families\.read\("(.+)"\)', PYTHON)
    config = Qwen3MoeConfig(num_hidden_layers=4, num_experts=8, num_attention_heads=4, num_key_value_heads=2)
    config.save_pretrained(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON, "README.md", "exec"), {})
    # embedding, final norm, head; a layer has q k v o, two head norms, two norms and a router, and 3 tensors an expert
    assert capsys.readouterr().out.startswith(f"{3 + 4 * (9 + 3 * 8)} tensors;")


def test_python_on_ranks_names_what_exists() -> None:
    from moeref import bridge, exporter

    rooms = {"bridge": bridge, "exporter": exporter}
    used = [
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(PYTHON_ON_RANKS + PYTHON_OF_BUCKETS))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in rooms
    ]
    assert used
    assert [f"{room}.{name}" for room, name in used if not hasattr(rooms[room], name)] == []


def test_the_table_of_families_is_that_of_the_matrices() -> None:
    assert "\n".join(families_table.lines()) + "\n\n" in README


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_pages_of_the_project_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^):]+)\)", text):
        assert (ROOT / path).exists(), path
    for command in [*commands(text), *inline_commands(text)]:
        check(command)


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert [cited[key] for key in ("title", "version", "license")] == [
        project[key] for key in ("name", "version", "license")
    ]
    assert cited.get("repository-code") == project.get("urls", {}).get("Repository")
    assert f"\n## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "rule", sorted(set(re.findall(r"[A-Z]{3}-\d{3}", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))))
)
def test_the_changelog_names_rules_that_exist(rule: str) -> None:
    assert rule in load_rules()


def test_figures_of_released_bridges_are_those_of_their_page() -> None:
    page = (ROOT / "docs" / "status" / "peers.md").read_text(encoding="utf-8")
    heads, *measured = [line.split(" | ") for line in re.findall(r"^\| (.+) \|$", page, flags=re.MULTILINE)][:10]
    columns = ["peer", "bytes exact", "logits", "refuses a lacking tensor", "refuses an unknown parameter"]
    expected = {row[0]: [row[heads.index(column)] for column in columns] for row in measured}
    told = re.findall(r"^\| ((?:mbridge|mcore|megatron|slime|areal|miles|roll).+) \|$", README, flags=re.MULTILINE)
    assert len(told) == 7
    for line in told:
        assert line.split(" | ") == expected[line.split(" | ")[0]]
