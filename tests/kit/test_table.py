"""The page about several targets: figures first, then defects by severity, then families and layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit_toy import failing, run
from moeref_conformance.contract.checks import BadInput, read_toml
from moeref_conformance.plan import known_failures
from moeref_conformance.plan.matrix import folder, load
from moeref_conformance.report import table
from moeref_conformance.targets.peers import PEERS

ROOT = Path(__file__).parents[2]
DEFECTS = read_toml(ROOT / "conformance/moeref_conformance/targets/peers/defects.toml")
TOLD = {"severity": "loud", "what": "It falls.", "affects": "All.", "main": "Not checked."}


@pytest.fixture
def known(tmp_path):
    """A run in which EXP-002 fails in every cell by a known failure of a defect."""
    results = run(tmp_path, EXP_002=failing())
    verdicts = [
        replace(v, status="xfail", reason="[rows] swapped") if v.status == "fail" else v for v in results.verdicts
    ]
    return replace(results, verdicts=verdicts)


def test_all_cells_read_so(tmp_path):
    results = run(tmp_path)
    claimed = sum(cell["claimed"] for cell in results.header["cells"])
    row = next(line for line in table.render([(results, [])]).splitlines() if line.startswith("| toy "))
    assert row.split("|")[1 + 1 + list(table.COLUMNS).index("bytes exact")].strip() == f"{claimed}/{claimed}"


def test_a_defect_is_told_under_its_severity(known):
    page = table.render([(known, [])], {"rows": TOLD})
    assert "### Loud\n\n**`rows`**" in page
    assert "Found by EXP-002 in" in page
    assert "Not looked into yet" not in page
    assert "\n1. `rows`\n" in page


def test_what_is_not_told_is_listed(known):
    assert "### Not looked into yet\n\n- toy " in table.render([(known, [])])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"script": "head.py slime"}, "- Without the kit: [head.py](../examples/defects/head.py) `slime`\n"),
        ({"script": "yarn.py"}, "- Without the kit: [yarn.py](../examples/defects/yarn.py)\n"),
        ({"no_script": "nothing is wrong."}, "- Without the kit: no script, since nothing is wrong.\n"),
    ],
)
def test_a_defect_links_its_script_or_says_why_it_has_none(known, more, told):
    assert told in table.render([(known, [])], {"rows": {**TOLD, **more}})


@pytest.mark.parametrize(
    "change", [{"severity": "mild"}, {"main": " "}, {"whatever": "x"}, {"script": "a.py", "no_script": "b"}]
)
def test_a_malformed_defect_is_refused(change):
    with pytest.raises(BadInput, match="defect rows"):
        table.render([], {"rows": {**TOLD, **change}})


def test_defects_of_peers_and_known_failures_name_each_other():
    matrix = load("peers")
    files = [folder() / "known" / f"{name}.toml" for name in PEERS]
    named = {entry.defect for file in files if file.is_file() for entry in known_failures.load(file, matrix)}
    assert table.checked(DEFECTS)
    assert named == DEFECTS.keys()


def test_every_defect_of_a_peer_has_a_script_or_a_reason_to_have_none():
    lacking = [name for name, entry in DEFECTS.items() if not entry.keys() & {"script", "no_script"}]
    assert lacking == []
    named = {entry["script"].split()[0] for entry in DEFECTS.values() if "script" in entry}
    assert named == {path.name for path in (ROOT / table.SCRIPTS).glob("*.py")} - {"by_hand.py"}
    silent = [name for name, entry in DEFECTS.items() if entry["severity"].startswith("silently")]
    assert [name for name in silent if "no_script" in DEFECTS[name]] == []
