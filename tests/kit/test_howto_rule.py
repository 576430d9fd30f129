"""How to add a rule, followed to the letter: three files, and the rule is green for moeref and red for its fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import howto

pytestmark = pytest.mark.cpu
PAGE = howto.page("add-a-rule.md")
PROGRAM = """
import json
from pathlib import Path
from moeref_conformance.contract.records import Observation
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.resolve import resolve
from moeref_conformance.selftest.faults import FAULTS
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.worlds.static import StaticWorld

cell = FAULTS["spaces-in-names"].cell
model = expected(cell, Path("expected"))
said = {}
for spec in ("moeref", "faulty:spaces-in-names"):
    target = resolve(spec)
    outcome = StaticWorld(target).run(cell, Path(spec), model.inputs, target.claims)
    seen = Observation.read(cell, Path(spec), outcome)
    case = Case(cell=cell, expected=model, observation=seen, baseline=None, claims=target.claims)
    rules = [r.id for r in load_rules().values() if r.group == "NAM" and r.applies("static")]
    said[spec] = {r: [f.message for f in JUDGES[r](case).findings] for r in rules}
fault = FAULTS["spaces-in-names"]
print(json.dumps({"said": said, "rules": [*fault.rules, *fault.also]}))
"""


def test_the_page_lists_the_files_that_it_changes() -> None:
    patterns = [name.replace("<subject>", "") for name in howto.listed(PAGE)]
    assert len(patterns) == 3
    for pattern, name in zip(patterns, howto.captions(PAGE), strict=True):
        assert name.startswith(pattern.removesuffix(".py"))


def test_the_new_rule_is_judged(tmp_path: Path) -> None:
    copy = howto.follow(PAGE, tmp_path)
    assert howto.changed(copy) == set(howto.captions(PAGE))
    answer = howto.judge(tmp_path, PROGRAM)
    good, wrong = answer["said"].values()
    assert "NAM-901" in good
    assert not any(good.values())
    assert "has a space" in wrong["NAM-901"][0]
    assert {rule for rule, findings in wrong.items() if findings} == set(answer["rules"])
