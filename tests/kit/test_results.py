"""The results file, the headline and the exit code."""

import json
import platform
from pathlib import Path

import pytest
from kit_toy import failing, run
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.results import Results, Verdict, Writer, read
from moeref_conformance.contract.standing import FINISHES
from moeref_conformance.report.diff import diff

RULES = {
    "hash": "r",
    "list": [
        {"id": "AAA-001", "level": "MUST"},
        {"id": "AAA-002", "level": "SHOULD"},
        {"id": "BBB-001", "level": "MUST", "requires": ["AAA-001"]},
        {"id": "BBB-002", "level": "MUST", "requires": ["BBB-001"]},
    ],
}
PROFILES = [{"name": name, "version": "1.0", "text": name, "groups": [name.upper() * 3]} for name in "ab"]


def results(*rows, complete=True, strict=False, **settings):
    """Cells `c0`, `c1`, ... with one status a rule of RULES."""
    header = {
        "rules": RULES,
        "profiles": PROFILES,
        "matrix": {"hash": "m"},
        "settings": {"strict": strict, **settings},
        "cells": [{"id": f"c{number}"} for number in range(len(rows))],
    }
    verdicts = [
        Verdict(cell=f"c{number}", rule=rule, status=status)
        for number, row in enumerate(rows)
        for rule, status in zip([rule["id"] for rule in RULES["list"]], row, strict=False)
    ]
    return Results(header=header, verdicts=verdicts, complete=complete)


@pytest.mark.parametrize(
    ("rows", "how", "headline"),
    [
        ([["pass"], ["pass"]], {}, "conforms to a 1.0; 2 of 2 rows claimed"),
        ([["pass"], ["unclaimed"], ["fail"]], {}, "does not conform to a 1.0; 2 of 3 rows claimed"),
        # Only MUST rows decide and are counted, with `strict` all.
        ([["pass", "fail"]], {}, "conforms to a 1.0; 1 of 1 rows claimed"),
        ([["pass", "fail"]], {"strict": True}, "does not conform to a 1.0; 2 of 2 rows claimed"),
        ([["xfail"], ["xpass"], ["untested"]], {}, "does not conform to a 1.0; 3 of 3 rows claimed"),
        ([["xfail"], ["pass"]], {}, "conforms, but for known failures, to a 1.0; 2 of 2 rows claimed"),
        ([["xfail"], ["pass"]], {"strict": True}, "does not conform to a 1.0; 2 of 2 rows claimed"),
        ([["xfail"]], {}, "undecided on a 1.0; 1 of 1 rows claimed"),
        ([["fail"], ["error"]], {}, "the kit broke on a 1.0; 2 of 2 rows claimed"),
        ([["unclaimed"]], {}, "nothing claimed; 0 of 1 rows claimed"),
        ([["disabled"]], {}, "nothing claimed; 0 of 0 rows claimed"),
        ([["pass"]], {"complete": False}, "undecided on a 1.0; 1 of 1 rows claimed"),
        ([["pass"]], {"cells": ["c0"]}, "selected rows conform to a 1.0; 1 of 1 rows claimed"),
        ([["fail"]], {"cells": ["c0"]}, "does not conform to a 1.0; 1 of 1 rows claimed"),
        ([["pass", "pass", "pass"]], {}, "conforms to a 1.0 and b 1.0; 2 of 2 rows claimed"),
        ([["pass", "pass", "unclaimed"]], {}, "conforms to a 1.0; 1 of 2 rows claimed"),
        ([["pass", "pass", "fail"]], {}, "conforms to a 1.0; does not conform to b 1.0; 2 of 2 rows claimed"),
        ([["pass", "pass", "fail"]], {"profiles": ["a"]}, "conforms to a 1.0; 1 of 1 rows claimed"),
        # What a red rule keeps from being judged is undecided, also through another rule.
        (
            [["pass", "pass", "pass", "pass"], ["fail", "pass", "untested", "untested"]],
            {},
            "does not conform to a 1.0; undecided on b 1.0; 6 of 6 rows claimed",
        ),
        (
            [["pass", "pass", "pass", "pass"], ["xfail", "pass", "untested", "untested"]],
            {},
            "conforms, but for known failures, to a 1.0 and b 1.0; 6 of 6 rows claimed",
        ),
        # Untested with nothing wrong before it: as where a rule is judged in fp32 only.
        (
            [["pass", "pass", "pass", "pass"], ["pass", "pass", "untested", "untested"]],
            {},
            "conforms to a 1.0 and b 1.0; 6 of 6 rows claimed",
        ),
        # A cell that could not be run.
        ([["pass"], ["untested"]], {}, "undecided on a 1.0; 2 of 2 rows claimed"),
    ],
)
def test_headline(rows, how, headline):
    assert str(results(*rows, **how).headline) == headline


def test_what_a_rank_that_did_not_finish_leaves_untested_is_undecided(monkeypatch):
    monkeypatch.setitem(RULES["list"][0], "id", FINISHES)
    monkeypatch.setitem(PROFILES[0], "groups", ["RUN"])
    monkeypatch.setitem(RULES["list"][2], "requires", [])
    found = results(["pass"] * 4, ["fail", "pass", "untested", "untested"]).headline
    assert str(found) == "does not conform to a 1.0; undecided on b 1.0; 6 of 6 rows claimed"


def test_who_claims_no_facet_conforms_to_nothing(monkeypatch):
    monkeypatch.setitem(RULES["list"][0], "facets", [])
    assert str(results(["pass"]).headline) == "nothing claimed; 0 of 1 rows claimed"
    assert str(results(["fail"]).headline) == "does not conform to a 1.0; 1 of 1 rows claimed"


def test_a_profile_says_what_its_rows_are():
    (standing,) = results(["pass"], ["xfail"], ["unclaimed"], ["pass"]).headline.standings
    figures = "2 of 3 claimed rows pass, 1 known to fail; 3 of 4 rows claimed"
    assert str(standing) == f"conforms, but for known failures, to a 1.0: {figures}"
    (standing,) = results(["unclaimed"]).headline.standings
    assert str(standing) == "nothing claimed of a 1.0: 0 of 1 rows"


@pytest.mark.parametrize(
    ("rows", "how", "code"),
    [
        ([["pass", "pass"]], {}, 0),
        ([["pass", "untested"]], {}, 0),
        ([["pass"], ["xfail"]], {}, 0),
        ([["pass"], ["xfail"]], {"strict": True}, 1),
        ([["pass", "fail"]], {}, 0),
        ([["pass", "fail"]], {"strict": True}, 1),
        ([["fail"]], {}, 1),
        ([["xpass"]], {}, 1),
        ([["fail"], ["error"]], {}, 2),
        ([["pass"]], {"complete": False}, 3),
        ([["pass"], ["untested"]], {}, 3),
        ([["unclaimed"]], {}, 3),
    ],
)
def test_exit_code(rows, how, code):
    assert results(*rows, **how).exit_code == code


def test_unknown_status_is_refused():
    with pytest.raises(ValueError, match="status 'ok'"):
        Verdict(cell="c", rule="r", status="ok")


def test_written_and_read_back(tmp_path):
    finding = Finding(stage="export", message="differs", rank=0, layer=0, expert=3, index=(0, 2), got="1")
    written = run(tmp_path, EXP_002=failing(finding), EXP_001=lambda case: Outcome(met="1e-7 ≤ 2e-6"))
    back = read(tmp_path / "out" / "results.jsonl")
    assert back.verdicts == written.verdicts
    assert back.header == json.loads(json.dumps(written.header))
    assert back.complete
    assert (back.exit_code, back.headline) == (written.exit_code, written.headline)
    assert back.seconds == {cell: pytest.approx(seconds) for cell, seconds in written.seconds.items()}


def test_header_says_what_decided_the_run(tmp_path):
    header = run(tmp_path).header
    assert header["target"]["claims"]["families"] == ["qwen3_moe"]
    assert set(header["versions"]) == {"python", "torch", "megatron-core", "transformers"}
    assert header["settings"]["deadline"] == 120.0
    assert len(header["rules"]["hash"]) == len(header["matrix"]["hash"]) == 8
    assert {"seed", "date", "platform", "kit"} <= set(header)
    processor = header["platform"].removeprefix(f"{platform.platform()}, ")
    assert processor.partition(",")[0] in Path("/proc/cpuinfo").read_text()


def test_crash_leaves_a_readable_file_without_footer(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = Writer(path, results(["pass"], ["pass"]).header)
    writer.cell("c0", [Verdict(cell="c0", rule="AAA-001", status="pass")], 1.0)  # and then the process is gone
    with path.open("a") as file:
        file.write('{"kind": "verd')  # cut while it was written
    back = read(path)
    assert [v.cell for v in back.verdicts] == ["c0"]
    assert back.exit_code == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with a header"),
        ("{}\n", "does not begin with a header"),
        ('{"kind": "header", "schema": 9}\n', "schema 9"),
        ('{"kind": "header", "schema": 1, "cells": []}\nnot json\n{}', ":2: not JSON"),
        ('{"kind": "header", "schema": 1, "cells": []}\n{"kind": "verdict", "cell": "c"}', ":2: not a line"),
        ('{"kind": "header", "schema": 1, "cells": []}\n{"kind": "spam"}', "unknown kind 'spam'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read(path)


def test_diff_sorts_changes():
    old, new = results(["pass"], ["fail"], ["untested"], ["pass"]), results(["fail"], ["pass"], ["xfail"])
    changes = diff(old, new)
    assert [c.cell for c in changes.worse] == ["c0"]
    assert [c.cell for c in changes.better] == ["c1"]
    assert [c.cell for c in changes.other] == ["c2"]
    assert (changes.only_old, changes.only_new) == (1, 0)
    assert diff(old, old).lines == ["no change"]
    was = "does not conform to a 1.0: 2 of 4 claimed rows pass, 1 untested; 4 of 4 rows claimed"
    now = "does not conform to a 1.0: 1 of 3 claimed rows pass, 1 known to fail; 3 of 3 rows claimed"
    assert changes.lines[0] == f"{was} → {now}"


def test_diff_sees_lost_exactness_but_not_its_digits():
    def met(value):
        one = results(["pass"])
        one.verdicts = [Verdict(cell="c0", rule="AAA-001", status="pass", met=value)]
        return one

    assert diff(met("exact"), met("1e-7 ≤ 2e-6")).worse
    assert diff(met("1e-7 ≤ 2e-6"), met("2e-7 ≤ 2e-6")).lines == ["no change"]


@pytest.mark.parametrize("what", ["rules", "matrix"])
def test_diff_refuses_other_revisions(what):
    old, new = results(["pass"]), results(["pass"])
    new.header = new.header | {what: new.header[what] | {"hash": "other"}}
    with pytest.raises(BadInput, match=f"do not compare: {what}"):
        diff(old, new)
