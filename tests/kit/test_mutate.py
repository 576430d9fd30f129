"""The mutation tool: what it changes, and that a changed function is the one that others hold."""

from __future__ import annotations

import ast
import importlib
import sys
import time
from contextlib import suppress
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
        ("Box.size", "yield from (1,) → None and (yield from (1,))"),
        ("Box.size", "1 → 2"),
    ]


def test_a_change_reaches_whoever_holds_the_function_and_is_taken_back(module) -> None:  # type: ignore[no-untyped-def]
    held, box = module.over, module.Box()
    with mutate.applied(next(m for m in mutate.mutants(module) if m.text == "a > b → a >= b")):
        assert held(1, 1) == 2
    assert held(1, 1) == 0
    with mutate.applied(next(m for m in mutate.mutants(module) if m.function == "Box.size")):
        assert list(box.size) == []
    assert list(module.Box().size) == [1]


def test_a_change_reaches_the_inside_of_a_decorator(module) -> None:  # type: ignore[no-untyped-def]
    with mutate.applied(next(m for m in mutate.mutants(module) if m.text == "2 → 3")):
        assert module.over(2, 1) == 3
    assert module.over(2, 1) == 2


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x += y", "x += y → x -= y"),
        ("if a.b: return", "if a.b:\n    return → if not a.b:\n    return"),
        ("x = y if f() else z", "y if f() else z → y if not f() else z"),
        ("f(x)", "f(x) → None and f(x)"),
    ],
)
def test_what_is_done_and_when_is_changed(code: str, text: str) -> None:
    (statement,) = ast.parse(f"def f():\n    {code}").body
    assert text in [mutate.change(node) for node in ast.walk(statement)]


@pytest.mark.parametrize("code", ["a.b", "'text'", "x = y", "return None"])
def test_other_code_is_left_alone(code: str) -> None:
    (statement,) = ast.parse(f"def f():\n    {code}").body
    assert [mutate.change(node) for node in ast.walk(statement) if not isinstance(node, ast.FunctionDef)].count("") > 0
    assert not any(mutate.change(node) for node in ast.walk(statement))


def test_a_failing_test_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_one_of_a_mutant.py"
    test.write_text("import os\n\ndef test_it():\n    assert 'CHANGED_BY_A_MUTANT' not in os.environ\n")
    assert mutate.run([str(test)]) == 0
    monkeypatch.setenv("CHANGED_BY_A_MUTANT", "1")
    assert mutate.run([str(test)]) == 1


@pytest.mark.parametrize("error", [AssertionError, KeyError, pytest.fail.Exception])
def test_a_check_that_raises_has_failed(error: type[BaseException]) -> None:
    def fails() -> None:
        raise error("no")

    assert mutate.outcome(fails) == "failed"
    assert mutate.outcome(lambda: None) == "passed"


def test_an_endless_check_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "SECONDS", 1)

    def endless() -> None:
        while True:
            with suppress(Exception):
                time.sleep(0.01)

    assert mutate.outcome(endless) == "late"
