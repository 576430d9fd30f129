"""Profiles: every rule is in one, and a list that changed has another version."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from moeref_conformance.contract import rules
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.rules import PROFILES, load_rules
from moeref_conformance.plan.matrix import folder, load

#: Profile and version, and a hash over its rows in the shipped matrices. The line of a released version stays as it is.
FROZEN = {
    "weights 1.0": "4f45463b",
    "logits 1.0": "523b9f45",
    "logprobs 1.0": "4b5c8e50",
    "gradients 1.0": "e7f6679c",
    "optimizer 1.0": "b8bf3218",
    "adapters 1.0": "49b2aea3",
    "settings 1.0": "25849042",
    "dispatch 1.0": "86536f71",
    "delta 1.0": "4f024b17",
    "quantised 1.0": "cc9f7533",
    "seeds 1.0": "a9b14d76",
    "replay 1.0": "5f862082",
    "sync 1.0": "6441f763",
}


def rows() -> dict[str, list[str]]:
    """The rows of each profile: matrix, cell and rule."""
    found: dict[str, list[str]] = {name: [] for name in PROFILES}
    for path in sorted(folder().glob("*.toml")):
        matrix = load(path.stem)
        for cell in matrix.cells:
            for rule in load_rules().values():
                if rule.judged_in(cell) and rule.id in matrix.rules[cell.id]:
                    found[rule.profile].append(f"{path.stem} {cell.id} {rule.id}")
    return found


def test_a_list_that_changed_has_another_version() -> None:
    """Rules and cells are the list. Who changes it raises the version in rules.toml and adds a line here."""
    listed = {str(PROFILES[name]): "\n".join(sorted(of)) for name, of in rows().items()}
    hashes = {profile: hashlib.sha256(text.encode()).hexdigest()[:8] for profile, text in listed.items()}
    assert hashes == {profile: FROZEN.get(profile) for profile in hashes}


def test_every_rule_is_in_one_profile() -> None:
    for rule in load_rules().values():
        assert [name for name, profile in PROFILES.items() if rule.group in profile.groups] == [rule.profile]


@pytest.mark.parametrize(("groups", "number"), [((), 0), (("FWD", "SED"), 2)])
def test_a_group_in_no_profile_or_in_two_is_refused(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[str, ...], number: int
) -> None:
    others = {**PROFILES, "logits": replace(PROFILES["logits"], groups=groups)}
    monkeypatch.setattr(rules, "PROFILES", others)
    with pytest.raises(BadInput, match=rf"is in {number} of \[profiles\], not in one"):
        load_rules.__wrapped__()
