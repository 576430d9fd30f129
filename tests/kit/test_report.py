"""What people read: complete, escaped, well formed, and in need of nothing else."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from kit_toy import ToyWorld, failing, run
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.results import Verdict
from moeref_conformance.contract.rules import PROFILES, load_rules
from moeref_conformance.contract.standing import Headline
from moeref_conformance.report import badge, html, issues, junit, markdown, table, terminal, write_all
from moeref_conformance.report.causes import Cause
from moeref_conformance.report.view import Mark, _tally, view
from moeref_conformance.selftest.known_bugs import KNOWN_BUGS

WEIGHTS = str(PROFILES["weights"])
EVIL = "<script>alert('x')</script> & ```"
FINDING = Finding(
    stage="export",
    message=f"differs {EVIL}\x00\x1b[31m",
    rank=1,
    coords="tp=1 pp=0",
    hf_name="model.layers.3.mlp.experts.5.up_proj.weight",
    local_name="decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
    global_name="decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
    layer=3,
    expert=5,
    index=(0, 7),
    expected="0.5 (0x3f000000)",
    got="-0.25 (0xbe800000)",
    diagnosis="equals its transpose",
)


@pytest.fixture
def failed(tmp_path):
    return run(
        tmp_path,
        EXP_002=failing(*[FINDING] * 7),
        EXP_006=lambda case: Outcome(met="exact"),
        NAM_001=lambda case: Outcome(met="7.2e-07 ≤ 2e-06"),
        LOD_001=broken,
    )


def broken(case):
    raise KeyError(EVIL)


def test_rules_of_replay_are_shown_where_they_are_judged(failed):
    assert "RPL" not in markdown.render(failed)
    for cell in failed.header["cells"]:
        cell["replay"] = "R3"
    assert "RPL" in markdown.render(failed)
    for rule in failed.header["rules"]["list"]:  # as kits before 0.2 wrote it
        rule["replay"] = next(iter(dict(rule.pop("cells")).values()), ())
    assert "RPL" in markdown.render(failed)
    for cell in failed.header["cells"]:
        cell["replay"] = "off"
    assert "RPL" not in markdown.render(failed)


def test_page_is_complete_and_escaped(failed):
    page = html.render(failed)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for value in ("rank", "1 (tp=1 pp=0)", FINDING.hf_name, FINDING.local_name, FINDING.global_name, "[0, 7]"):
        assert value in page
    for value in (FINDING.expected, FINDING.got, FINDING.diagnosis, "--cell qwen3_moe/tp2/gloo --rule EXP-002"):
        assert value in page
    assert page.count(FINDING.diagnosis) == 2  # of 21 findings: in the text of the cause, and of the first
    assert "family=glm4_moe is not claimed" in page
    head = failed.headline
    assert re.search(rf"<b>{head.passing}<i>/{head.claimed}</i></b>", page)
    assert re.search(rf"<b>{head.claimed}<i>/{head.rows}</i></b>", page)


def test_page_needs_nothing_else(failed):
    page = html.render(failed)
    assert not re.search(r"<(link|img|iframe|script)|@import|url\(|src=", page)
    assert "prefers-color-scheme: dark" in page


def test_links_of_the_page_lead_somewhere(failed):
    page = html.render(failed)
    identities = re.findall(r'\bid="([^"]+)"', page)
    assert len(identities) == len(set(identities))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(identities)


def test_every_cell_has_a_link_and_a_class_for_the_filters(failed):
    page = html.render(failed)
    for verdict in failed.verdicts:
        anchor = f"cell-{verdict.cell.replace('/', '-')}"
        assert f'<tr id="{anchor}"' in page
        assert f'href="#{anchor}"' in page
    red = {v.cell.replace("/", "-") for v in failed.verdicts if v.status in ("fail", "error", "untested")}
    good = set(re.findall(r'<tr id="cell-([^"]+)" class="good">', page))
    assert red
    assert not red & good
    families = set(re.findall(r'<details class="block of-([\w-]+)"', page))
    assert families == {v.cell.partition("/")[0].partition("+")[0] for v in failed.verdicts}
    assert {f'id="only-{family}"' in page for family in families} == {True}


def test_a_row_without_a_mark_in_a_group_is_not_tallied(failed):
    """A rule may be judged in some cells of a block only, such as in those of one rank."""
    (block, _) = view(failed).blocks
    row = replace(block.rows[0], name="wide", marks=dict.fromkeys(block.rows[0].marks, Mark()))
    blank = replace(block, rows=[*block.rows, row])
    for group, _, _ in block.groups():
        assert _tally(blank, group) == _tally(block, group)
        assert _tally(replace(block, rows=[row]), group) == Mark()


def test_each_group_and_rule_is_a_filter_of_the_columns(failed):
    page = html.render(failed)
    ids = [rule["id"] for rule in failed.header["rules"]["list"]]
    for name in {*ids, *(rule.partition("-")[0] for rule in ids)}:
        assert f'<option value="{name}">' in page
        assert f'body:has([value="{name}"]:checked) .grid [class*="r-"]:not([class*="r-{name}"])' in page
    for row in re.findall(r'<tr id="cell-.*?</tr>', page, re.DOTALL):
        assert {*re.findall(r'class="[\w ]*\br-([A-Z]+-\d+)"', row)} <= {*ids}
        assert row.count("<td") == 3 + len(re.findall(r"\br-[A-Z]+-\d+", row))  # name, ranks and seconds stay


def test_a_wide_table_scrolls_and_the_page_does_not(failed):
    """No table stands outside what scrolls. `test_report_in_a_browser` measures it."""
    page = html.render(failed)
    tables = page.count("<table ")
    assert tables == page.count('<div class="scroll"><table ') == page.count("</table></div>") > 3


def test_squares_say_exact_or_the_tolerance_met(failed):
    (block, _) = view(failed).blocks
    (row,) = [row for row in block.rows if row.id == "qwen3_moe/tp2/gloo"]
    texts = {rule: mark.text for rule, mark in row.marks.items()}
    assert (texts["NAM-001"], texts["EXP-006"], texts["EXP-002"], texts["LOD-001"]) == ("7e-7", "exact", "✗ 7", "!")
    for rule in ("RUN-001", "NAM-002", "LOD-003"):  # nothing is compared there
        assert (texts[rule], row.marks[rule].title) == ("✓", f"{rule}: pass")
    assert block.tallies["RUN"].text == "pass"


def test_issues_that_rules_name_are_links(failed):
    page = html.render(failed)
    assert '<a href="https://github.com/NVIDIA-NeMo/RL/issues/' in page
    texts = [*(why for rule in load_rules().values() for why in rule.why)]
    texts += [f"{bug} {entry.get('report', '')}" for bug, entry in KNOWN_BUGS.items()]
    named = {found for text in texts for found in re.findall(r"([\w./-]+)#\d+", text)}
    assert len(named) > 15
    assert not {name for name in named if "/" not in name} - issues.REPOSITORIES.keys()
    assert list(issues.pieces("a (verl#12, x#3), vllm-project/vllm#4.")) == [
        ("a (", ""),
        ("verl#12", "https://github.com/verl-project/verl/issues/12"),
        (", x#3), ", ""),
        ("vllm-project/vllm#4", "https://github.com/vllm-project/vllm/issues/4"),
        (".", ""),
    ]


def test_a_recommendation_that_is_not_followed_is_shown_apart(tmp_path):
    results = run(tmp_path, EXP_005=failing(FINDING))
    head = results.headline
    assert (results.exit_code, head.verdicts) == (0, f"conforms to {WEIGHTS}")
    assert head.passing == head.claimed == 3 * head.standings[0].rows // 4
    shown = view(results)
    assert not shown.red
    assert [failure.rule.id for failure in shown.advice] == ["EXP-005"]
    assert (shown.counts["fail"], shown.counts["advice"], results.advice) == (0, 3, 3)
    mark = shown.blocks[0].rows[0].marks["EXP-005"]
    assert mark.text == "△ 1"
    assert f'<a id="{mark.href}">' in html.render(results)
    tallies = shown.blocks[0].tallies
    assert (tallies["EXP"].text, tallies["SHOULD"].text) == ("pass", "3 not followed")
    assert "### Recommendations not followed" in markdown.render(results)
    assert 'id="recommendations-not-followed"' in html.render(results)
    assert 'id="failures"' not in html.render(results)
    strict = run(tmp_path, settings={"strict": True}, EXP_005=failing(FINDING))
    assert (strict.exit_code, view(strict).red[0].rule.id, strict.advice) == (1, "EXP-005", 0)


def held(expert, **more):
    """A finding on a gate that holds another expert."""
    name = f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"
    said = f"holds expert {expert - 8}, expected expert {expert}"
    return Finding("export", f"{name}: differs", rank=1, hf_name=name, diagnosis=said, **more)


def test_findings_of_one_pattern_are_one_cause_over_tensors_and_cells(tmp_path):
    many = replace(held(8), count=32, ranks=(1, 3), kinds={"gate_proj": 16})
    results = run(tmp_path, EXP_002=failing(many, Finding("export", "another", rank=0)))
    (failure,) = view(results).red
    texts = [cause.text for cause in failure.causes]
    assert texts == [
        "48 gate_proj tensors of 3 cells hold expert 0, expected expert 8",
        "another (and 2 alike of 3 cells)",
    ]
    page, summary = html.render(results), markdown.render(results)
    assert page.count(f"<b>{texts[0]}</b>") == summary.count(texts[0]) == 1
    assert "32 findings, 16 gate_proj tensors, on ranks 1, 3" in page
    assert [len(cause.verdicts) for cause in failure.causes] == [3, 3]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([held(8)], f"{held(8).hf_name} holds expert 0, expected expert 8"),
        ([held(8), held(9)], "2 gate_proj tensors hold expert 0, expected expert 8"),
        ([replace(held(8), diagnosis="all zero")], f"{held(8).hf_name}: all zero"),
        ([replace(held(8), diagnosis="is layer -1", kinds={"a": 1, "b": 2})], "3 a and b tensors are layer -1"),
        ([Finding("config", "moe_x is 1, not 2")], "moe_x is 1, not 2"),
    ],
)
def test_a_cause_in_words(found, text):
    verdict = Verdict(cell="c", rule="EXP-002", status="fail")
    assert Cause([(verdict, finding) for finding in found]).text == text


def test_a_finding_without_a_diagnosis_is_told_once(tmp_path):
    page = html.render(run(tmp_path, EXP_002=failing(), EXP_007=failing(replace(held(8), message="differs here"))))
    assert page.count("<b>differs (and 2 alike of 3 cells)</b>") == 1
    assert '<p class="message">differs</p>' not in page
    assert '<p class="message">differs here</p>' in page


def test_what_follows_is_folded_under_its_cause_in_the_same_cell(tmp_path):
    only_tp2 = lambda case: failing()(case) if case.cell.layout.tp == 2 else Outcome()  # noqa: E731
    results = run(tmp_path, LOD_001=only_tp2, EXP_002=failing(), EXP_007=failing(), NAM_006=failing())
    told = [(f.rule.id, f.cells, [(other.rule.id, other.cells) for other in f.follows]) for f in view(results).red]
    # What ought to have been refused comes last.
    assert told == [
        ("LOD-001", 1, [("EXP-002", 1), ("EXP-007", 1)]),
        ("EXP-002", 2, [("EXP-007", 2)]),
        ("NAM-006", 3, []),
    ]
    said = terminal.failures(results)
    assert next(line for line in said if line.startswith("✗")) == "✗ LOD-001 differs"
    assert "    follows from it: EXP-002, EXP-007" in said
    page = html.render(results)
    assert re.search(r"follows from it: EXP-002 <small>in 1 cell</small>, EXP-007", page)
    assert "follows from LOD-001: EXP-002 in 1 cell, EXP-007 in 1 cell" in markdown.render(results)


def test_failures_come_before_the_settings_of_the_run(failed):
    page = html.render(failed)
    places = [page.index(f'id="{name}"') for name in ("failures", "overview", "cells", "settings", "rules")]
    assert places == sorted(places)


def test_the_terminal_shows_the_first_finding_of_each_red_rule(failed, tmp_path):
    said = terminal.failures(run(tmp_path, EXP_002=failing(held(8)), EXP_005=failing(FINDING)))
    assert said[:3] == [
        "✗ EXP-002 3 gate_proj tensors of 3 cells hold expert 0, expected expert 8",
        f"    {held(8).message}",
        "    in qwen3_moe/one/gloo, rank 1",
    ]
    assert not any("EXP-005" in line for line in said)
    assert terminal.failures(failed)[0].startswith("! LOD-001 the judge raised KeyError")


def test_unfinished_run_says_so_everywhere(failed):
    failed.complete = False
    failed.verdicts = [v for v in failed.verdicts if v.cell == "qwen3_moe/one/gloo"]
    assert "The run did not finish" in html.render(failed)
    assert "did not finish" in markdown.render(failed)
    assert ET.fromstring(junit.render(failed)).find(".//testcase[@name='complete']/error") is not None
    assert json.loads(badge.render(failed))["color"] == "lightgrey"
    assert failed.headline.verdicts == f"undecided on {WEIGHTS}"
    tally = view(failed).blocks[0].tallies["RUN"]
    assert tally.text == "2 not reached"


def test_junit_counts_and_survives_control_characters(failed):
    root = ET.fromstring(junit.render(failed))
    suite = root.find("testsuite[@name='qwen3_moe/tp2/gloo']")
    assert suite is not None
    assert (suite.get("failures"), suite.get("errors")) == ("1", "1")
    failure = suite.find("testcase[@name='EXP-002']/failure")
    assert "equals its transpose" in failure.text
    unclaimed = root.find("testsuite[@name='glm4_moe/tp2/gloo']")
    assert unclaimed.get("skipped") == unclaimed.get("tests")


def test_markdown_fences_hold(failed):
    text = markdown.render(failed)
    assert text.count("```") % 2 == 0
    assert f"**{failed.headline}**" in text
    assert f"- {failed.headline.standings[0]}\n" in text
    assert "**3 fail**" in text


@pytest.mark.parametrize(("judges", "color"), [({}, "green"), ({"EXP_002": failing()}, "red")])
def test_badge(tmp_path, judges, color):
    data = json.loads(badge.render(run(tmp_path, ToyWorld(), **judges)))
    assert (data["schemaVersion"], data["label"], data["color"]) == (1, "conformance toy", color)
    verdict = "conforms" if color == "green" else "does not conform"
    assert re.fullmatch(rf"{verdict} to {WEIGHTS}; \d+ of \d+ rows claimed", data["message"])


def test_a_badge_as_a_picture_says_the_same_and_the_core(failed):
    failed.header["versions"]["megatron-core"] = "0.19.<2>"
    said, picture = json.loads(badge.render(failed)), ET.fromstring(badge.picture(failed))
    title, *parts = (text for element in picture.iter() if (text := element.text))
    assert parts == [f"{said['label']}, Megatron-Core 0.19.<2>", said["message"]]
    assert title == ": ".join(parts)
    *_, last = picture.iterfind("{*}rect")
    assert float(last.get("x")) + float(last.get("width")) == float(picture.get("width"))
    assert last.get("fill") == badge.COLORS[said["color"]]


def test_a_badge_of_many_profiles_counts_them(tmp_path):
    results = run(tmp_path, EXP_002=failing())
    (weights, *others) = results.headline.standings
    many = [replace(other, claimed=1, code=0) for other in others]
    assert badge.verdict(Headline((weights, *many))) == f"conforms to {len(many)} of {len(many) + 1} profiles"


def test_every_output_says_the_profile(failed, tmp_path):
    standing = str(failed.headline.standings[0])
    assert standing.startswith(f"the kit broke on {WEIGHTS}: ")
    assert f"<b>{WEIGHTS}</b>" in html.render(failed)
    assert standing in table.render([(failed, [])])
    good = run(tmp_path)
    for results, child in ((failed, "skipped"), (good, None)):
        case = ET.fromstring(junit.render(results)).find(f"testsuite[@name='profiles']/testcase[@name='{WEIGHTS}']")
        assert [kind.tag for kind in case] == ([child] if child else [])


def test_all_files_are_written(failed, tmp_path):
    page = write_all(failed, tmp_path / "there")
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "badge.json",
        "badge.svg",
        "junit.xml",
        "report.html",
        "summary.md",
    ]
