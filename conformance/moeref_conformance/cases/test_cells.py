"""The matrix as pytest tests: one for every rule in every cell. A cell runs once, at the test of its first rule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.backends import GPU_BACKENDS
from moeref_conformance.contract.rules import Rule
from moeref_conformance.plugin import served
from moeref_conformance.report.view import lines
from moeref_conformance.run.runner import Runner


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each cell and rule that the plan selects."""
    plan, _ = served(metafunc.config)
    grouped = metafunc.config.pluginmanager.hasplugin("xdist")
    metafunc.parametrize(
        ("cell", "rule"),
        [
            pytest.param(
                cell,
                rule,
                id=f"{cell.id}-{rule.id}",
                marks=[pytest.mark.cell(cell.id), pytest.mark.rule(rule.id), _where(cell)]
                + ([pytest.mark.xdist_group(cell.id)] if grouped else []),
            )
            for cell in plan.cells
            for rule in plan.rules_of(cell)
            if plan.enabled(cell, rule)
        ],
    )


def _where(cell: Cell) -> pytest.MarkDecorator:
    """`gpu` where tensors of the model live on one, else `cpu`: what `pytest -m` selects by."""
    return pytest.mark.gpu if cell.backend in GPU_BACKENDS else pytest.mark.cpu


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs cells; its worlds stay open for the whole session."""
    with Runner.opened(*served(request.config)) as opened:
        yield opened


def test_rule(runner: Runner, cell: Cell, rule: Rule) -> None:
    """A failure of a MUST fails; unclaimed and untested are skipped with their reason; known failures are xfail."""
    verdict = next(v for v in runner.cell(cell)[0] if v.rule == rule.id)
    text = "\n".join(lines(verdict))
    if verdict.status in ("unclaimed", "untested"):
        pytest.skip(f"{verdict.status}: {verdict.reason}")
    if verdict.status == "xfail" or (verdict.status == "fail" and rule.level == "SHOULD"):
        pytest.xfail(text)
    if verdict.status != "pass":
        pytest.fail(text, pytrace=False)
