"""Known failures: which rules are expected to fail in which cells, why, where that is tracked, and until when.

    [[known]]
    rule = "EXP-002"                    # an id or a list of ids
    where = { vpp = 2, tied = true }    # as in a matrix exclusion
    matrix = "cpu"                      # optional: only for this matrix
    outcome = "fail"                    # or "flaky": judged and reported, never green
    pattern = "holds layer"             # a regular expression, or several: every finding has to match one of them
    reason = "VPP offset counts dense layers"
    link = "https://..."                # where it is tracked, or if it is not yet:
    reproduce = "nox -s ..."            # the command that shows it
    expires = 2027-02-01                # after this day the entry is an error
    defect = "vpp-offset"               # optional: an id that entries of one cause share

Entries are strict: a known failure that passes is `xpass`, one with another finding fails as if it were not listed, and
an entry that covers nothing is an error.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.checks import BadInput, check_keys, check_known, read_toml, texts
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.rules import Rule, load_rules
from moeref_conformance.plan.matrix import Matrix, check_where, matches

OUTCOMES = ("fail", "flaky")
KEYS = ("rule", "where", "outcome", "pattern", "reason", "expires")
EVIDENCE = ("link", "reproduce")


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """One entry of a known failures file."""

    rules: tuple[str, ...]
    where: Mapping[str, Any]
    outcome: str
    patterns: tuple[str, ...]
    reason: str
    expires: datetime.date
    link: str = ""
    reproduce: str = ""
    matrix: tuple[str, ...] = ()
    defect: str = ""

    @property
    def text(self) -> str:
        """Defect, reason, evidence and expiry in one line."""
        evidence, defect = self.link or f"`{self.reproduce}`", f"[{self.defect}] " if self.defect else ""
        return f"{defect}{self.reason} ({evidence}, until {self.expires.isoformat()})"

    @property
    def said(self) -> str:
        """The patterns, for a message."""
        return " or ".join(map(repr, self.patterns))

    def covers(self, cell: Cell, rule: Rule) -> bool:
        """Whether the entry is about `rule` in `cell`."""
        judged = rule.judged_in(cell)
        return rule.id in self.rules and judged and matches(self.where, cell)

    def knows(self, text: str) -> bool:
        """Whether one of the patterns is found in `text`."""
        return any(re.search(pattern, text) for pattern in self.patterns)

    def others(self, findings: Iterable[Finding]) -> list[Finding]:
        """The findings that the entry does not excuse."""
        return [finding for finding in findings if not self.knows(finding.text)]


def find(matrix: Matrix, target_name: str) -> Path | None:
    """`known/<target>.toml` next to the matrix file, if there is one."""
    path = matrix.path.parent / "known" / f"{target_name}.toml"
    return path if path.is_file() else None


def load(path: Path, matrix: Matrix, today: datetime.date | None = None) -> tuple[KnownFailure, ...]:
    """The entries for `matrix`. Raises `BadInput` for a malformed, expired, overlapping or idle one."""
    return parse(read_toml(path), path.name, matrix, today or datetime.datetime.now(datetime.UTC).date())


def parse(data: Mapping[str, Any], file: str, matrix: Matrix, today: datetime.date) -> tuple[KnownFailure, ...]:
    """`load` for parsed TOML."""
    check_keys(file, data, ("known",), ("known",))
    rules = load_rules()
    entries: list[KnownFailure] = []
    taken: dict[tuple[str, str], int] = {}
    for number, table in enumerate(data["known"], 1):
        spot = f"{file}: known {number}"
        entry = _entry(spot, table, rules)
        if entry.expires < today:
            raise BadInput(
                f"{spot} ({', '.join(entry.rules)}) expired on {entry.expires}: fix it, or look again and renew"
            )
        if entry.matrix and matrix.name not in entry.matrix:
            continue
        for pair in _covered(spot, entry, matrix, rules):
            if pair in taken:
                raise BadInput(f"{spot}: {pair[1]} in {pair[0]} is already covered by known {taken[pair]}")
            taken[pair] = number
        entries.append(entry)
    return tuple(entries)


def _covered(spot: str, entry: KnownFailure, matrix: Matrix, rules: Mapping[str, Rule]) -> list[tuple[str, str]]:
    """Cells and rules of the matrix that the entry is about. Raises `BadInput` if there are none."""
    covered = [
        (cell.id, rule_id)
        for cell in matrix.cells
        for rule_id in entry.rules
        if rule_id in matrix.rules[cell.id] and entry.covers(cell, rules[rule_id])
    ]
    if not covered:
        raise BadInput(
            f"{spot}: rule={', '.join(entry.rules)} where={dict(entry.where)} matches nothing in {matrix.name}"
        )
    return covered


def lookup(entries: Iterable[KnownFailure], cell: Cell, rule: Rule) -> KnownFailure | None:
    """The entry that covers `rule` in `cell`, if any."""
    return next((entry for entry in entries if entry.covers(cell, rule)), None)


def _entry(spot: str, table: Any, rules: Mapping[str, Rule]) -> KnownFailure:
    check_keys(spot, table, (*KEYS, *EVIDENCE, "matrix", "defect"), KEYS)
    ids = texts(spot, table, "rule")
    check_known(spot, "rule", ids, rules)
    if table["outcome"] not in OUTCOMES:
        raise BadInput(f"{spot}: outcome={table['outcome']!r} is not one of {', '.join(OUTCOMES)}")
    _check_evidence(spot, table)
    # A TOML date-time is a date too for Python; only a plain date is meant.
    if type(table["expires"]) is not datetime.date:
        raise BadInput(f"{spot}: expires={table['expires']!r} is not a date such as 2027-02-01")
    said = {key: table[key].strip() for key in ("reason", "defect", *EVIDENCE) if key in table}
    return KnownFailure(
        rules=ids,
        where=check_where(spot, table["where"]),
        outcome=table["outcome"],
        patterns=_patterns(spot, table),
        expires=table["expires"],
        matrix=texts(spot, table, "matrix"),
        **said,
    )


def _patterns(spot: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    patterns = texts(spot, table, "pattern")
    for pattern in patterns:
        try:
            anything = any(re.search(pattern, text) for text in ("", "~"))
        except re.error as error:
            raise BadInput(f"{spot}: pattern={pattern!r} is not a regular expression: {error}") from None
        if anything:
            raise BadInput(f"{spot}: pattern={pattern!r} matches every finding; give words of the one that is known")
    return patterns


def _check_evidence(spot: str, table: Mapping[str, Any]) -> None:
    given = [key for key in EVIDENCE if key in table]
    if not given:
        raise BadInput(f"{spot}: 'link' is missing, and there is no 'reproduce' in its place")
    for key in ("reason", *given):
        if not isinstance(table[key], str) or not table[key].strip():
            raise BadInput(f"{spot}: the {key} is empty")
    if "link" in given and not table["link"].startswith(("https://", "http://")):
        raise BadInput(f"{spot}: link={table['link']!r} is not a URL")
