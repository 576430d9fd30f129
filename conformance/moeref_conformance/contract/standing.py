"""How a target stands: for each profile a verdict and its figures, and the headline that says them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeref_conformance.contract.statuses import CONFORMANT, INCOMPLETE, KIT_ERROR, NOT_CONFORMANT, RED

#: What is said of a profile, by code; then where known failures, and where a selection is all that holds.
WORDS = ("conforms to", "does not conform to", "the kit broke on", "undecided on")
BUT_FOR_KNOWN, SELECTED = "conforms, but for known failures, to", "selected rows conform to"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One profile in one run. Its rows are its rules × cells that decide (a MUST does, with `strict` any rule), without
    those that are disabled. `code` has the meaning of an exit code, for these rows alone.

    Of the claimed rows some pass, some are known failures, and some could not be judged.
    """

    profile: str  # name and version
    text: str
    code: int
    passing: int
    known: int
    untested: int
    claimed: int
    rows: int
    selected: bool = False  # cells or rules were left out by the user

    @property
    def words(self) -> str:
        """What is said of the profile, to be followed by its name; empty if nothing of it is claimed."""
        if not self.claimed:
            return ""
        if self.code == CONFORMANT and (self.known or self.selected):
            return BUT_FOR_KNOWN if self.known else SELECTED
        return WORDS[self.code]

    @property
    def remarks(self) -> list[str]:
        """Why fewer rows pass than are claimed although none is red."""
        counts = {"known to fail": self.known, "untested": self.untested}
        return [f"{number} {what}" for what, number in counts.items() if number]

    def __str__(self) -> str:
        if not self.claimed:
            return f"nothing claimed of {self.profile}: 0 of {self.rows} rows"
        passing = ", ".join([f"{self.passing} of {self.claimed} claimed rows pass", *self.remarks])
        return f"{self.words} {self.profile}: {passing}; {self.claimed} of {self.rows} rows claimed"


@dataclass(frozen=True)
class Headline:
    """What is said of every profile, and how many rows are claimed: a target that claims less passes more easily."""

    standings: tuple[Standing, ...]

    @property
    def passing(self) -> int:
        """Rows that pass."""
        return sum(standing.passing for standing in self.standings)

    @property
    def claimed(self) -> int:
        """Rows that are claimed."""
        return sum(standing.claimed for standing in self.standings)

    @property
    def rows(self) -> int:
        """Rows, claimed or not."""
        return sum(standing.rows for standing in self.standings)

    @property
    def verdicts(self) -> str:
        """`conforms to weights 1.0 and seeds 1.0; does not conform to logits 1.0`."""
        said: dict[str, list[str]] = {}
        for standing in self.standings:
            if standing.words:
                said.setdefault(standing.words, []).append(standing.profile)
        return "; ".join(f"{words} {listed(names)}" for words, names in said.items()) or "nothing claimed"

    def __str__(self) -> str:
        return f"{self.verdicts}; {self.claimed} of {self.rows} rows claimed"


def listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])


#: The rule that every rank finishes.
FINISHES = "RUN-001"
#: By rule id: its status in one cell.
Row = Mapping[str, str]
#: By rule id: the rules that it requires.
Requires = Mapping[str, Iterable[str]]


def standings(header: Mapping[str, Any], cells: Sequence[Row], complete: bool) -> tuple[Standing, ...]:
    """Of every profile that has rows in this run and was not left out by its name; `cells` are the statuses."""
    settings, rules = header.get("settings", {}), header["rules"]["list"]
    strict, selected = bool(settings.get("strict")), bool(settings.get("cells") or settings.get("rules"))
    requires = {rule["id"]: rule.get("requires", ()) for rule in rules}
    found = []
    for profile in header.get("profiles", ()):
        if settings.get("profiles") and profile["name"] not in settings["profiles"]:
            continue
        deciding = [rule["id"] for rule in rules if strict or rule["level"] == "MUST"]
        mine = {rule for rule in deciding if rule.partition("-")[0] in profile["groups"]}
        counts = Counter(_state(rule, row, requires) for row in cells for rule in row if rule in mine)
        if not counts.keys() & RED and not _of_a_facet(rules, cells, mine):
            counts = Counter(unclaimed=counts.total() - counts["disabled"])
        code = _code(counts, strict) if complete else INCOMPLETE
        found.append(_standing(profile, counts, code, selected))
    return tuple(standing for standing in found if standing.rows)


def _of_a_facet(rules: Iterable[Mapping[str, Any]], cells: Sequence[Row], mine: Container[str]) -> bool:
    """Whether a row is claimed whose rule judges a facet. That ranks start and end says nothing about a profile."""
    faceted = {rule["id"] for rule in rules if rule["id"] in mine and rule.get("facets", True)}
    return any(row[rule] not in ("unclaimed", "disabled") for row in cells for rule in row if rule in faceted)


def _standing(profile: Mapping[str, Any], counts: Counter[str], code: int, selected: bool) -> Standing:
    rows = counts.total() - counts["disabled"]
    return Standing(
        profile=f"{profile['name']} {profile['version']}",
        text=profile["text"],
        code=code,
        passing=counts["pass"],
        known=counts["xfail"],
        untested=counts["untested"] + counts["blocked"],
        claimed=rows - counts["unclaimed"],
        rows=rows,
        selected=selected,
    )


def _code(counts: Counter[str], strict: bool) -> int:
    if counts["error"]:
        return KIT_ERROR
    if any(counts[status] for status in RED) or (strict and counts["xfail"]):
        return NOT_CONFORMANT
    return CONFORMANT if counts["pass"] and not counts["blocked"] else INCOMPLETE


def _state(rule: str, row: Row, requires: Requires) -> str:
    """The status, but of an untested row `blocked` if its cell could not be run or a rule that it requires is red or
    broken, and `xfail` if that one is a known failure. What stays untested has nothing wrong before it. Where a rank
    did not finish, that is before all."""
    if row[rule] != "untested":
        return row[rule]
    before = {_state(needed, row, requires) for needed in {FINISHES, *requires[rule]} & row.keys() - {rule}}
    if before & {*RED, "error", "blocked"}:
        return "blocked"
    if "xfail" in before:
        return "xfail"
    return "untested" if "pass" in row.values() else "blocked"
