"""Failures by their causes: one for all findings of a pattern, whatever the ranks, tensors and cells.

What follows from another failure of the same cell is folded under that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeref_conformance.contract.findings import Finding, kind_of
from moeref_conformance.contract.records import REFUSALS
from moeref_conformance.contract.results import Verdict
from moeref_conformance.contract.rules import Rule
from moeref_conformance.contract.standing import listed

#: Verbs that a diagnosis begins with, as said of several tensors.
_PLURAL = {"holds": "hold", "is": "are"}


@dataclass
class Cause:
    """Findings of one rule and one pattern, each with its verdict; or verdicts of one reason, without findings."""

    found: list[tuple[Verdict, Finding | None]]

    @property
    def verdict(self) -> Verdict:
        """The first of the verdicts."""
        return self.found[0][0]

    @property
    def finding(self) -> Finding | None:
        """The finding to look at."""
        return self.found[0][1]

    @property
    def verdicts(self) -> list[Verdict]:
        """One of each cell in which it shows."""
        return list({verdict.cell: verdict for verdict, _ in self.found}.values())

    @property
    def text(self) -> str:
        """`16 gate_proj tensors of 3 cells hold expert 0, expected expert 8`."""
        first = self.finding
        if first is None:
            return (self.verdict.reason.splitlines() or [self.verdict.status])[0]
        if not first.diagnosis:
            more = self._number() - 1
            alike = f" (and {more} alike{self._where()})" if more else self._where()
            return f"{first.message or 'a finding without a message'}{alike}"
        subject, several = self._subject(first)
        verb, _, rest = first.diagnosis.partition(" ")
        if verb not in _PLURAL:
            return f"{subject}: {first.diagnosis}"
        return f"{subject} {_PLURAL[verb] if several else verb} {rest}"

    def _number(self) -> int:
        return sum(finding.count for _, finding in self.found if finding)

    def _where(self) -> str:
        return f" of {len(self.verdicts)} cells" if len(self.verdicts) > 1 else ""

    def _subject(self, first: Finding) -> tuple[str, bool]:
        """What is wrong, and whether that is more than one tensor."""
        kinds: Counter[str] = Counter()
        for _, finding in self.found:
            kinds.update((finding.kinds or {kind_of(finding.tensor): 1}) if finding and finding.tensor else {})
        if kinds.total() > 1:
            return f"{kinds.total()} {listed(sorted(kinds))} tensors{self._where()}", True
        return f"{first.tensor or first.message}{self._where()}", False


@dataclass
class Failure:
    """One rule and its failed verdicts, in the order of the matrix; and the failures that follow from them."""

    rule: Rule
    verdicts: list[Verdict]
    follows: list[Failure] = field(default_factory=list)

    @property
    def causes(self) -> list[Cause]:
        """Its causes, the one in most cells first."""
        by_pattern: dict[object, list[tuple[Verdict, Finding | None]]] = {}
        for verdict in self.verdicts:
            for finding in verdict.findings or (None,):
                pattern = finding.pattern if finding else verdict.reason
                by_pattern.setdefault((pattern, verdict.reason), []).append((verdict, finding))
        return sorted(map(Cause, by_pattern.values()), key=lambda cause: -len(cause.verdicts))

    @property
    def cells(self) -> int:
        """In how many cells it shows."""
        return len(self.verdicts)


def failures(verdicts: Iterable[Verdict], rules: Mapping[str, Rule]) -> list[Failure]:
    """Failures by rule: first what is wrong, then what ought to have been refused."""
    by_rule: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_rule.setdefault(verdict.rule, []).append(verdict)
    found = [Failure(rule, by_rule[rule.id]) for rule in rules.values() if rule.id in by_rule]
    return sorted(found, key=lambda failure: bool(set(failure.rule.steps) & set(REFUSALS)))


def folded(found: Sequence[Failure]) -> list[Failure]:
    """The same failures, with verdicts under the failure of the same cell that they follow from, if one is there."""
    rules = {failure.rule.id: failure.rule for failure in found}
    red = {(v.cell, v.rule) for failure in found for v in failure.verdicts if v.status == "fail"}

    def cause(cell: str, rule: str) -> str:
        before = [one for one in rules[rule].follows if (cell, one) in red] if (cell, rule) in red else []
        return cause(cell, before[0]) if before else rule

    under: dict[str, dict[str, list[Verdict]]] = {}
    for failure in found:
        for verdict in failure.verdicts:
            of_rule = under.setdefault(cause(verdict.cell, verdict.rule), {})
            of_rule.setdefault(verdict.rule, []).append(verdict)
    return [_with_what_follows(rule, rules, under[rule.id]) for rule in rules.values() if rule.id in under]


def _with_what_follows(rule: Rule, rules: Mapping[str, Rule], verdicts: Mapping[str, list[Verdict]]) -> Failure:
    follows = [Failure(rules[other], of) for other, of in verdicts.items() if other != rule.id]
    return Failure(rule, verdicts[rule.id], follows)
