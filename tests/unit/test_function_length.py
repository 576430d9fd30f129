"""Functions are short: none over 60 lines, half of them under 10."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lengths(folder: Path) -> dict[str, int]:
    """Lines of every function, by file and name."""
    return {
        f"{file.relative_to(folder)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("folder", ["moeref", "conformance/moeref_conformance"])
def test_functions_are_short(folder: str) -> None:
    found = lengths(ROOT / folder)
    assert {name: lines for name, lines in found.items() if lines > 60} == {}
    assert statistics.median(found.values()) < 10


def test_a_long_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def f():\n" + "    x = 1\n" * 60)
    assert lengths(tmp_path) == {"long.py:1 f": 61}
