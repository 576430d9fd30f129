"""The mutation tool: what it changes, and that a changed function is the one that others hold."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.kit import mutate

MODULE = '''
import functools


def twice(function):
    @functools.wraps(function)
    def called(*given):
        return function(*given) * 2
    return called


@twice
def over(a, b):
    """1 is no number here."""
    return a > b and a != 3


class Box:
    @functools.cached_property
    def size(self):
        yield from (1,)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    (tmp_path / "to_change.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("to_change")
    del sys.modules["to_change"]


def test_every_part_of_a_body_is_changed_once(module) -> None:  # type: ignore[no-untyped-def]
    found = [(mutant.function, mutant.text) for mutant in mutate.mutants(module)]
    assert found == [
        ("twice", "function(*given) * 2 → function(*given) // 2"),
        ("twice", "2 → 3"),
        ("over", "a > b and a != 3 → a > b or a != 3"),
        ("over", "a > b → a >= b"),
        ("over", "a != 3 → a == 3"),
        ("over", "3 → 4"),
        ("Box.size", "yield from (1,) → yield from ()"),
        ("Box.size", "1 → 2"),
    ]


def test_a_change_reaches_whoever_holds_the_function(module) -> None:  # type: ignore[no-untyped-def]
    held = module.over
    assert held(1, 1) == 0
    mutate.apply(next(m for m in mutate.mutants(module) if m.text == "a > b → a >= b"))
    assert held(1, 1) == 2
    mutate.apply(next(m for m in mutate.mutants(module) if m.function == "Box.size"))
    assert list(module.Box().size) == []


@pytest.mark.parametrize("code", ["a.b", "'text'", "x = y", "return None"])
def test_other_code_is_left_alone(code: str) -> None:
    (statement,) = ast.parse(f"def f():\n    {code}").body
    assert [mutate.change(node) for node in ast.walk(statement) if not isinstance(node, ast.FunctionDef)].count("") > 0
    assert not any(mutate.change(node) for node in ast.walk(statement))


def test_a_failing_test_is_seen(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import os\n\ndef test_it():\n    assert 'CHANGED_BY_A_MUTANT' not in os.environ\n")
    assert mutate.outcome(lambda: None, [str(test)]) == "passed"
    assert mutate.outcome(lambda: os.environ.update(CHANGED_BY_A_MUTANT="1"), [str(test)]) == "failed"
