"""The golden list and its checks."""

from dataclasses import replace

import pytest
from moeref_conformance.contract.cells import Claims
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.rules import load_rules, parse_rules, revision, select

ENTRY = """
[AAA-001]
level = "MUST"
text = "x"
facets = []
backends = ["gloo"]
why = ["y"]
since = "0.1"
"""


def test_prerequisites_come_first():
    seen: set[str] = set()
    for rule in load_rules().values():
        assert set(rule.requires) <= seen
        seen.add(rule.id)


def test_every_rule_has_a_judge_and_every_judge_a_rule():
    from moeref_conformance.judges import JUDGES

    assert set(JUDGES) == set(load_rules())


def test_selecting_a_rule_selects_what_it_requires():
    assert select(["EXP-012"]) == {"EXP-012", "EXP-006", "RUN-001"}
    assert select([]) == set(load_rules())


def test_unknown_prefix_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'EXP-002'"):
        select(["EXP-0002"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('level = "MUST"', 'level = "WILL"', "level='WILL'"),
        ("facets = []", 'facets = ["name"]', "did you mean 'names'"),
        ('backends = ["gloo"]', 'backends = ["glo"]', "did you mean 'gloo'"),
        ('backends = ["gloo"]', "backends = []", "nothing could judge it"),
        ("[AAA-001]", "[AAA-1]", "three capitals"),
        ("since", "sinse", "did you mean 'since'"),
        ('since = "0.1"', 'since = "0.1"\nrequires = ["AAA-001"]', "circular"),
        ('since = "0.1"', 'since = "0.1"\nclaims = { receiver = "all" }', "did you mean 'receivers'"),
        ('since = "0.1"', 'since = "0.1"\nclaims = { receivers = "some" }', "receivers='some' is not one of"),
        ('since = "0.1"', 'since = "0.1"\ncells = { reply = ["R3"] }', "did you mean 'replay'"),
        ('since = "0.1"', 'since = "0.1"\ncells = { replay = ["R4"] }', "unknown value of replay 'R4'"),
        ('since = "0.1"', 'since = "0.1"\nrequires = ["AAA-002"]', "requires or follows unknown 'AAA-002'"),
    ],
)
def test_malformed_entries_are_refused(old, new, message):
    with pytest.raises(BadInput, match=message):
        parse_rules(ENTRY.replace(old, new))


def test_revision_changes_with_the_text_of_a_rule_and_not_with_its_reasons():
    one, other = parse_rules(ENTRY), parse_rules(ENTRY.replace('why = ["y"]', 'why = ["z"]'))
    assert revision(one) == revision(other)
    assert revision(one) != revision(parse_rules(ENTRY.replace('text = "x"', 'text = "xx"')))


def test_a_rule_of_one_design_leaves_targets_of_another_alone():
    rule = parse_rules(ENTRY + 'claims = { receivers = "writer" }')["AAA-001"]
    claims = Claims(facets=frozenset(), families=frozenset(), backends=frozenset())
    assert rule.unclaimed(claims) == ""
    assert rule.unclaimed(replace(claims, receivers="all")) == "the target claims receivers='all'"


def test_worlds_with_processes_are_judged_like_gloo():
    rule = load_rules()["EXP-002"]
    assert rule.applies("nccl")
    assert rule.applies("gloo-cuda")
    assert not rule.applies("static")
