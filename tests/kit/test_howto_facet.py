"""How to add a facet, followed to the letter: five files, and a target that claims it is asked and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import howto

pytestmark = pytest.mark.cpu
PAGE = howto.page("add-a-facet.md")
TARGET = """
from contextlib import contextmanager
from types import SimpleNamespace
from moeref_conformance.contract.api import Claims, Info

class Target:
    info = Info(name="toy", version="1")
    claims = Claims(facets=frozenset({"versions"}), families=frozenset({"toy"}), backends=frozenset({"static"}))

    def __init__(self, step, least=0):
        self.step, self.least = step, least

    @contextmanager
    def open(self, cell, world):
        yield SimpleNamespace(versions=self)

    def after(self, pushes):
        if pushes < self.least:
            raise ValueError("a negative number of pushes")
        return pushes * self.step

good, stale, lenient = Target(1), Target(0), Target(1, -9)
"""
PROGRAM = """
import json
from pathlib import Path
from moeref_conformance.contract.api import FACETS, Cell, Layout
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.rules import GROUPS, load_rules
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.resolve import resolve
from moeref_conformance.steps.facet import facets
from moeref_conformance.worlds.static import StaticWorld

cell = Cell(family="toy", layout_name="tp2", layout=Layout(tp=2), backend="static")
said = {}
for name in ("good", "stale", "lenient"):
    target = resolve("toy_target:" + name)
    outcome = StaticWorld(target).run(cell, Path(name), {"hf_config": "."}, target.claims)
    seen = Observation.read(cell, Path(name), outcome)
    case = Case(cell=cell, expected=None, observation=seen, baseline=None, claims=target.claims)
    said[name] = [[f.message, f.count] for f in JUDGES["VER-001"](case).findings]
heading = GROUPS[load_rules()["VER-001"].group]
print(json.dumps({"said": said, "last": [FACETS[-1], facets()[-1].name], "heading": heading}))
"""


def test_the_page_lists_the_files_that_it_changes() -> None:
    assert len(howto.listed(PAGE)) == 5
    assert {name.replace("<facet>", "versions") for name in howto.listed(PAGE)} == set(howto.captions(PAGE))


def test_the_new_facet_is_claimed_asked_and_judged(tmp_path: Path) -> None:
    copy = howto.follow(PAGE, tmp_path)
    assert howto.changed(copy) == set(howto.captions(PAGE))
    (tmp_path / "toy_target.py").write_text(TARGET, encoding="utf-8")
    answer = howto.judge(tmp_path, PROGRAM)
    assert answer["last"] == ["versions", "versions"]
    assert answer["heading"] == "versions"
    assert answer["said"] == {
        "good": [],
        "stale": [["after 1 pushes version 0 is served", 2]],
        "lenient": [["a negative number of pushes was taken", 1]],
    }
