"""Known failures are strict in every direction."""

import datetime

import pytest
from kit_toy import MATRIX, ToyWorld, cells, failing, run
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.rules import PROFILES
from moeref_conformance.plan.known_failures import find, parse
from moeref_conformance.report import html

TODAY = datetime.date(2026, 1, 1)
PASS = Outcome()
ENTRY = {
    "rule": "EXP-002",
    "where": {"layout": "tp2", "family": "qwen3_moe"},
    "outcome": "fail",
    "pattern": "rows 1 and 2",
    "reason": "rows swapped",
    "link": "https://example.org/1",
    "expires": datetime.date(2027, 2, 1),
}
FILE = """
[[known]]
rule = "EXP-002"
where = { layout = "tp2", family = "qwen3_moe" }
outcome = "OUTCOME"
pattern = PATTERN
reason = "rows swapped"
link = "https://example.org/1"
expires = 9999-01-01
"""


def entries(tmp_path, *tables):
    return parse({"known": list(tables)}, "toy.toml", cells(MATRIX, tmp_path), TODAY)


def test_well_formed(tmp_path):
    (entry,) = entries(tmp_path, ENTRY)
    assert entry.text == "rows swapped (https://example.org/1, until 2027-02-01)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "EXP-02"}, "unknown rule 'EXP-02'; did you mean"),
        ({"where": {"tp": 16}}, "matches nothing in toy"),
        ({"where": {"layot": "tp2"}}, "did you mean 'layout'"),
        ({"where": {}}, "non-empty table"),
        ({"outcome": "broken"}, "not one of fail, flaky"),
        ({"pattern": "rows ["}, r"pattern='rows \[' is not a regular expression"),
        ({"pattern": "x|.*"}, "matches every finding"),
        ({"pattern": "."}, "matches every finding"),
        ({"pattern": ["rows 1", "rows?|"]}, "matches every finding"),
        ({"pattern": []}, "known 1: pattern: expected a string or a non-empty list"),
        ({"reason": ""}, "reason is empty"),
        ({"link": "issue 5"}, "not a URL"),
        ({"expires": datetime.date(2025, 12, 31)}, "expired on 2025-12-31"),
        ({"expires": "2027-02-01"}, "not a date"),
        ({"until": 1}, "unknown key 'until'"),
    ],
)
def test_mistakes_are_refused(tmp_path, change, message):
    with pytest.raises(BadInput, match=message):
        entries(tmp_path, ENTRY | change)


def test_a_command_may_stand_for_the_link(tmp_path):
    untracked = {k: v for k, v in ENTRY.items() if k != "link"} | {"reproduce": "nox -s smoke"}
    assert entries(tmp_path, untracked)[0].text == "rows swapped (`nox -s smoke`, until 2027-02-01)"
    with pytest.raises(BadInput, match="reproduce is empty"):
        entries(tmp_path, untracked | {"reproduce": " "})


@pytest.mark.parametrize("key", sorted(ENTRY))
def test_nothing_is_optional(tmp_path, key):
    with pytest.raises(BadInput, match=f"'{key}' is missing"):
        entries(tmp_path, {k: v for k, v in ENTRY.items() if k != key})


def test_two_entries_for_the_same_row_are_refused(tmp_path):
    with pytest.raises(BadInput, match="already covered by known 1"):
        entries(tmp_path, ENTRY, ENTRY | {"where": {"tp": 2}})


def test_entry_for_another_matrix_need_not_match(tmp_path):
    assert entries(tmp_path, ENTRY | {"where": {"tp": 16}, "matrix": "gpu"}) == ()


def statuses(tmp_path, outcome, pattern="'differs'", **judges):
    known = tmp_path / "known.toml"
    known.write_text(FILE.replace("OUTCOME", outcome).replace("PATTERN", pattern))
    results = run(tmp_path, ToyWorld(), {"known_failures": known}, **judges)
    return results.table["qwen3_moe/tp2/gloo"]["EXP-002"], results


def test_expected_failure_is_xfail_and_neither_passes_nor_is_red(tmp_path):
    verdict, results = statuses(
        tmp_path, "fail", EXP_002=lambda case: failing()(case) if case.cell.layout.tp == 2 else PASS
    )
    assert verdict.status == "xfail"
    assert verdict.findings
    assert "rows swapped" in verdict.reason
    assert results.exit_code == 0
    assert results.headline.verdicts == f"conforms, but for known failures, to {PROFILES['weights']}"
    assert ">conforms, but for known failures</span>" in html.render(results)
    assert results.headline.standings[0].known == 1
    assert results.headline.claimed - results.headline.passing == 1


SECOND = Finding(stage="export", message="14 rows are zero", diagnosis="is all zeros")


@pytest.mark.parametrize("outcome", ["fail", "flaky"])
def test_another_finding_than_the_known_one_is_red(tmp_path, outcome):
    both = failing(Finding(stage="export", message="differs"), SECOND)
    verdict, results = statuses(tmp_path, outcome, EXP_002=both)
    assert (verdict.status, results.exit_code) == ("fail", 1)
    assert verdict.findings[0] == SECOND
    assert len(verdict.findings) == 2
    assert verdict.reason == "not the known failure, whose pattern is 'differs'"


def test_patterns_are_looked_for_in_message_and_diagnosis(tmp_path):
    both = failing(Finding(stage="export", message="differs"), SECOND)
    patterns = "['^differs$', 'zero: is all zeros']"
    verdict, _ = statuses(
        tmp_path, "fail", patterns, EXP_002=lambda case: both(case) if case.cell.layout.tp == 2 else PASS
    )
    assert verdict.status == "xfail"


def test_unexpected_pass_is_not_conformant(tmp_path):
    verdict, results = statuses(tmp_path, "fail")
    assert verdict.status == "xpass"
    assert results.exit_code == 1


def test_flaky_is_never_green(tmp_path):
    verdict, results = statuses(tmp_path, "flaky")
    assert verdict.status == "xfail"
    assert "passed this time" in verdict.reason
    assert results.exit_code == 0


def test_strict_excuses_nothing(tmp_path):
    known = tmp_path / "known.toml"
    known.write_text(FILE.replace("OUTCOME", "flaky").replace("PATTERN", "'differs'"))
    assert run(tmp_path, ToyWorld(), {"known_failures": known, "strict": True}).exit_code == 1


def test_file_is_found_by_the_name_of_the_target(tmp_path):
    matrix = cells(MATRIX, tmp_path)
    assert find(matrix, "toy") is None
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "toy.toml").write_text(FILE)
    assert find(matrix, "toy") == tmp_path / "known" / "toy.toml"
