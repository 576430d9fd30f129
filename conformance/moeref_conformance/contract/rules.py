"""The golden list: `rules.toml` as checked `Rule` objects in the order in which they are judged, its revision, and the
profiles that its groups make up."""

from __future__ import annotations

import graphlib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from moeref_conformance.contract.api import FACETS
from moeref_conformance.contract.backends import BACKENDS, WITHOUT_MEGATRON
from moeref_conformance.contract.cells import AXES, DESIGNS, Cell, Claims
from moeref_conformance.contract.checks import BadInput, check_keys, check_known, nearest, text_list
from moeref_conformance.contract.standing import FINISHES

LEVELS = ("MUST", "SHOULD")

#: The tables of `rules.toml` that are no rules: the subject of each group of rules, for headings, and the profiles.
HEADINGS, LISTS = "groups", "profiles"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of `rules.toml`; its comment there says what each field means."""

    id: str
    level: str
    text: str
    facets: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    since: str = ""
    faults: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    cells: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    ranks: int = 0
    claims: tuple[tuple[str, Any], ...] = ()

    @property
    def group(self) -> str:
        """The part before the dash: `EXP` of `EXP-002`."""
        return self.id.partition("-")[0]

    @property
    def profile(self) -> str:
        """The name of the profile that its group is in."""
        return next(profile.name for profile in PROFILES.values() if self.group in profile.groups)

    def applies(self, backend: str) -> bool:
        """Whether the rule is judged in cells of this backend. `gloo` means every backend with ranks of Megatron."""
        return backend in self.backends or (backend not in WITHOUT_MEGATRON and "gloo" in self.backends)

    def judged_in(self, cell: Cell) -> bool:
        """Whether the rule is judged in the cell, by its backend, number of ranks and axes."""
        asked = all(AXES[name].of(cell) in values for name, values in self.cells)
        return self.applies(cell.backend) and asked and self.ranks in (0, cell.layout.world)

    def unclaimed(self, claims: Claims) -> str:
        """Why these claims leave the rule out: a facet that they lack, or another design; empty if they do not."""
        if missing := [facet for facet in self.facets if facet not in claims.facets]:
            return f"the target does not claim {' and '.join(missing)}"
        others = [name for name, value in self.claims if getattr(claims, name) != value]
        claimed = ", ".join(f"{name}={getattr(claims, name)!r}" for name in others)
        return claimed and f"the target claims {claimed}"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A named list of rules that a target can conform to: all of some groups. Its version changes with the list."""

    name: str
    version: str
    text: str
    groups: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@cache
def load_rules() -> dict[str, Rule]:
    """Every rule by id, prerequisites before those that require them, otherwise in the order of the file.

    Raises `BadInput` for an entry that is not well formed, names an unknown rule, or closes a cycle.
    """
    rules = _rules(_TABLES)
    for rule in rules.values():
        if rule.group not in GROUPS:
            raise BadInput(f"rules: {rule.id}: [{HEADINGS}] says nothing of {rule.group}")
        if len(names := [name for name, profile in PROFILES.items() if rule.group in profile.groups]) != 1:
            raise BadInput(f"rules: {rule.id}: {rule.group} is in {len(names)} of [{LISTS}], not in one")
    return rules


@cache
def judged_facets() -> frozenset[str]:
    """The facets that a rule needs. No rule checks a claim of any other."""
    return frozenset(facet for rule in load_rules().values() for facet in rule.facets)


def parse_rules(text: str) -> dict[str, Rule]:
    """`load_rules` for a text in the format of `rules.toml`."""
    return _rules(tomllib.loads(text))


def _rules(tables: Mapping[str, Any]) -> dict[str, Rule]:
    entries = {key: entry for key, entry in tables.items() if key not in (HEADINGS, LISTS)}
    rules = {rule_id: _rule(rule_id, entry) for rule_id, entry in entries.items()}
    for rule in rules.values():
        for needed in (*rule.requires, *rule.follows):
            if needed not in rules:
                raise BadInput(f"rules: {rule.id} requires or follows unknown {needed!r}{nearest(needed, rules)}")
    try:
        before = {rule.id: (*rule.requires, *rule.follows) for rule in rules.values()}
        order = list(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError as error:
        raise BadInput(f"rules: circular requirements: {' -> '.join(error.args[1])}") from error
    # Stable: a rule moves down only as far as its prerequisites require.
    depth: dict[str, int] = {}
    for rule_id in order:
        depth[rule_id] = max((depth[needed] + 1 for needed in rules[rule_id].requires), default=0)
    return {rule_id: rules[rule_id] for rule_id in sorted(rules, key=depth.__getitem__)}


def select(prefixes: Iterable[str], rules: Mapping[str, Rule] | None = None) -> frozenset[str]:
    """Ids of the rules that start with one of `prefixes` (all if there are none), what those require, and RUN-001.

    Raises `BadInput` for a prefix that matches no rule.
    """
    rules = load_rules() if rules is None else rules
    prefixes = list(prefixes)
    # Where a rank failed other rules are untested, so that a selection without RUN-001 would see nothing wrong.
    chosen = {FINISHES} & rules.keys() if prefixes else set(rules)
    for prefix in prefixes:
        matching = {rule_id for rule_id in rules if rule_id.startswith(prefix)}
        if not matching:
            raise BadInput(f"no rule starts with {prefix!r}{nearest(prefix, [*rules, *GROUPS])}")
        chosen |= matching
    for rule_id in reversed(list(rules)):
        if rule_id in chosen:
            chosen.update(rules[rule_id].requires)
    return frozenset(chosen)


def groups_of(profiles: Iterable[str]) -> list[str]:
    """The groups of rules of these profiles, by name. Raises `BadInput` for an unknown name."""
    names = list(profiles)
    check_known("--profile", "profile", names, PROFILES)
    return [group for name in names for group in PROFILES[name].groups]


def revision(rules: Mapping[str, Rule] | None = None) -> str:
    """A hash of eight hex digits over what decides a verdict; reasons, links and comments do not change it."""
    rules = load_rules() if rules is None else rules
    parts = [
        [r.id, r.level, r.text, r.facets, sorted(r.backends), sorted(r.requires), r.cells, r.claims, r.ranks]
        for r in rules.values()
    ]
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:8]


def _rule(rule_id: str, entry: Any) -> Rule:
    where = f"rules: {rule_id}"
    if not re.fullmatch(r"[A-Z]{3}-\d{3}", rule_id):
        raise BadInput(f"{where}: an id is three capitals, a dash and three digits")
    lists = ("facets", "backends", "requires", "follows", "why", "faults", "steps")
    required = ("level", "text", "facets", "backends", "why", "since")
    check_keys(where, entry, ("level", "text", "since", "claims", "cells", "ranks", *lists), required)
    if entry["level"] not in LEVELS:
        raise BadInput(f"{where}: level={entry['level']!r} is not one of {', '.join(LEVELS)}")
    values: dict[str, Any] = {k: tuple(text_list(f"{where}: {k}", entry[k])) if entry.get(k) else () for k in lists}
    for key, known in (("facets", FACETS), ("backends", BACKENDS)):
        check_known(where, f"value of {key}", values[key], known)
    if not values["backends"]:
        raise BadInput(f"{where}: backends is empty, so nothing could judge it")
    if type(ranks := entry.get("ranks", 0)) is not int or ranks < 0:
        raise BadInput(f"{where}: ranks={ranks!r} is not a number of ranks")
    values["claims"], values["cells"] = _claims(where, entry.get("claims", {})), _cells(where, entry.get("cells", {}))
    level, text, since = (entry[key] for key in ("level", "text", "since"))
    return Rule(id=rule_id, level=level, text=text, since=since, ranks=ranks, **values)


def _claims(where: str, named: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    check_known(where, "design in claims", named, DESIGNS)
    for name, value in named.items():
        if value not in DESIGNS[name]:
            raise BadInput(f"{where}: claims {name}={value!r} is not one of {DESIGNS[name]}")
    return tuple(named.items())


def _cells(where: str, named: Mapping[str, Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    check_known(where, "axis in cells", named, AXES)
    for name, values in named.items():
        if AXES[name].default is False:
            if values not in ([True], [False]) or type(values[0]) is not bool:
                raise BadInput(f"{where}: {name}: expected [true] or [false], got {values!r}")
            continue
        check_known(where, f"value of {name}", text_list(f"{where}: {name}", values), AXES[name].choices or values)
    return tuple((name, tuple(values)) for name, values in named.items())


_TABLES = tomllib.loads(files("moeref_conformance.contract").joinpath("rules.toml").read_text(encoding="utf-8"))
GROUPS: Mapping[str, str] = _TABLES[HEADINGS]
PROFILES: Mapping[str, Profile] = {
    name: Profile(name=name, version=entry["version"], text=entry["text"], groups=tuple(entry["groups"]))
    for name, entry in _TABLES[LISTS].items()
}
