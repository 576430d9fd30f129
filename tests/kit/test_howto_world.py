"""How to add a world, followed to the letter: one file, and two ranks meet in a world of the new backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import howto

PAGE = howto.page("add-a-world.md")
PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
from moeref_conformance.contract.cells import Cell, Layout
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.worlds.forked import ForkedWorld

sys.path.insert(0, {toys!r})
from toy_targets import Toy

claims = replace(Toy.claims, backends=frozenset({{"gloo-again"}}))

Path("cell").mkdir()
cell = Cell(family="toy", layout_name="dp2", layout=Layout(world=2), backend="gloo-again")
with ForkedWorld("toy_targets:target", backend="gloo-again", entry="toy_targets:trivial", deadline=60) as world:
    outcome = world.run(cell, Path("cell"), {{"hf_config": "."}}, claims)
seen = [json.loads(Path("cell", f"rank{{rank:04d}}", "seen.json").read_text())["sum"] for rank in range(2)]
judged = load_rules()["RUN-001"].applies("gloo-again")
print(json.dumps({{"ok": outcome.ok, "error": outcome.error, "sums": seen, "judged": judged, "id": cell.id}}))
"""


def test_the_page_lists_the_files_that_it_changes() -> None:
    assert howto.listed(PAGE) == howto.captions(PAGE) == ["contract/backends.py"]


@pytest.mark.ranks
def test_ranks_meet_in_the_new_world(tmp_path: Path) -> None:
    copy = howto.follow(PAGE, tmp_path)
    assert howto.changed(copy) == set(howto.captions(PAGE))
    toys = str(Path(__file__).parent)
    answer = howto.judge(tmp_path, PROGRAM.format(toys=toys))
    assert answer == {"ok": True, "error": "", "sums": [1.0, 1.0], "judged": True, "id": "toy/dp2/gloo-again"}
