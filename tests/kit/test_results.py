"""The results file, the headline and the exit code."""

import json

import pytest
from kit_toy import failing, run
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.results import Results, Verdict, Writer, read
from moeref_conformance.report.diff import diff

RULES = {"hash": "r", "list": [{"id": "AAA-001", "level": "MUST"}, {"id": "AAA-002", "level": "SHOULD"}]}


def results(*rows, complete=True, strict=False):
    """Cells `c0`, `c1`, ... with one status a rule: AAA-001 is a MUST, AAA-002 a SHOULD."""
    header = {
        "rules": RULES,
        "matrix": {"hash": "m"},
        "settings": {"strict": strict},
        "cells": [{"id": f"c{number}"} for number in range(len(rows))],
    }
    verdicts = [
        Verdict(cell=f"c{number}", rule=rule, status=status)
        for number, row in enumerate(rows)
        for rule, status in zip(("AAA-001", "AAA-002"), row, strict=False)
    ]
    return Results(header=header, verdicts=verdicts, complete=complete)


@pytest.mark.parametrize(
    ("rows", "headline"),
    [
        ([["pass"], ["pass"]], "2/2 claimed cells pass; claims cover 2/2"),
        ([["pass"], ["unclaimed"], ["fail"]], "1/2 claimed cells pass; claims cover 2/3"),
        ([["pass", "fail"]], "1/1 claimed cells pass; claims cover 1/1"),
        ([["xfail"], ["xpass"], ["error"], ["untested"]], "0/4 claimed cells pass; claims cover 4/4"),
        ([["unclaimed", "disabled"]], "0/0 claimed cells pass; claims cover 0/1"),
    ],
)
def test_headline(rows, headline):
    assert str(results(*rows).headline) == headline


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
