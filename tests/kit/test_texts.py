"""Texts of a target, whatever is in them and however long, can be shown, and end no run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable

import kit_toy
import pytest
from kit_toy import run
from moeref_conformance import cli
from moeref_conformance.contract.api import Info
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import error_record
from moeref_conformance.contract.results import read
from moeref_conformance.contract.texts import END, MOST, fit
from moeref_conformance.judges import Case
from moeref_conformance.report import write_all

pytestmark = pytest.mark.cpu
TP2 = "qwen3_moe/tp2/gloo"
#: A lone surrogate, an escape sequence of a terminal, and other characters that XML forbids.
ODD = "weight \ud800 \x1b[31m \x00 \x85 \ufffe\r"
ODD_SHOWN = r"weight \ud800 \x1b[31m \x00 \x85 \ufffe\r"


def red(**texts: str) -> Callable[[Case], Outcome]:
    """A judge with one finding that has these texts."""
    return lambda case: Outcome(findings=(Finding(**{"stage": "export", "message": "differs", **texts}),))


def test_odd_characters_of_a_target_are_shown_escaped_everywhere(tmp_path, capsys):
    def raises(case):
        raise ValueError(ODD)

    results = run(tmp_path, EXP_001=red(message=ODD, hf_name=ODD, got=ODD, diagnosis=ODD), EXP_003=raises)
    assert results.table[TP2]["EXP-001"].findings[0].message == ODD_SHOWN
    assert ODD_SHOWN in results.table[TP2]["EXP-003"].reason
    assert read(tmp_path / "out" / "results.jsonl").verdicts == results.verdicts
    write_all(results, tmp_path / "out")
    for name in ("report.html", "summary.md", "junit.xml", "results.jsonl"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert not [c for c in text if c != "\n" and not c.isprintable()][:3], name
    assert ODD_SHOWN in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    ET.parse(tmp_path / "out" / "junit.xml")


def test_an_odd_version_of_a_target_reaches_no_file_and_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kit_toy.Target, "info", Info(name="toy", version=ODD))
    results = run(tmp_path)
    page = write_all(results, tmp_path / "out")
    ET.parse(tmp_path / "out" / "junit.xml")
    cli._say(results, page)
    assert ODD_SHOWN in capsys.readouterr().out


def test_old_results_with_odd_characters_give_well_formed_junit(tmp_path):
    results = run(tmp_path)
    results.header["target"]["name"] = ODD
    write_all(results, tmp_path / "out")
    ET.parse(tmp_path / "out" / "junit.xml")


def test_a_finding_without_a_message_is_reported(tmp_path):
    write_all(run(tmp_path, EXP_001=red(message="")), tmp_path / "out")
    assert "FAIL EXP-001 in qwen3_moe/one/gloo\n" in (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    cases = ET.parse(tmp_path / "out" / "junit.xml").iterfind(f".//testcase[@classname='{TP2}'][@name='EXP-001']")
    failures = [failure for case in cases for failure in case.iterfind("failure")]
    assert [failure.get("message") for failure in failures] == ["fail"]
    assert str(failures[0].text).startswith(f"FAIL EXP-001 in {TP2}\n")


def test_errors_on_the_terminal_are_escaped(tmp_path, capsys):
    (tmp_path / "odd.jsonl").write_text("{\x1b[31m}\n{}\n")
    assert cli.main(["report", str(tmp_path / "odd.jsonl\x1b[31m")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_long_texts_are_cut_and_say_so(tmp_path):
    long = "a" * MOST + "b" * 2_000_000 + "the end"
    results = run(tmp_path, EXP_001=red(message=long, got=long))
    message = results.table[TP2]["EXP-001"].findings[0].message
    assert f"{len(long) - MOST} characters left out" in message
    assert message.startswith("aaa")
    assert message.endswith("the end")
    assert fit(message) == message
    pages = [
        write_all(of, tmp_path / "out").stat().st_size for of in (results, run(tmp_path, EXP_001=red(message="a")))
    ]
    assert pages[0] - pages[1] < 20_400  # the rest grows with the rules
    assert fit("a" * (MOST + END)) == "a" * (MOST + END)


def test_a_huge_message_is_short_in_the_record():
    try:
        raise ValueError("x" * 50_000_000)
    except ValueError as error:
        record = error_record(error)
    assert len(json.dumps(record)) < 300_000
    assert "characters left out" in record["message"]
