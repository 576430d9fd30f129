"""What changed between two runs of the same rules over the same matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.results import RED, Results, Verdict

BAD = (*RED, "error")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One rule in one cell whose verdict changed."""

    cell: str
    rule: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.rule} {self.cell}: {self.old} → {self.new}"


@dataclass(kw_only=True)
class Diff:
    """`worse` became red, broke, or lost exactness; `better` is the reverse; `other` is any other change."""

    worse: list[Change] = field(default_factory=list)
    better: list[Change] = field(default_factory=list)
    other: list[Change] = field(default_factory=list)
    only_old: int = 0
    only_new: int = 0

    @property
    def lines(self) -> list[str]:
        """For people, worst first."""
        text: list[str] = []
        for title, changes in (("worse", self.worse), ("better", self.better), ("changed", self.other)):
            if changes:
                text.append(f"{title}: {len(changes)}")
                text += [f"  {change}" for change in changes]
        for number, run in ((self.only_old, "old"), (self.only_new, "new")):
            if number:
                text.append(f"only in the {run} run: {number} (what is missing has not failed)")
        return text or ["no change"]


def diff(old: Results, new: Results) -> Diff:
    """Compare verdict by verdict. Raises `BadInput` if rules or matrix are of different revisions."""
    for what in ("rules", "matrix"):
        before, after = old.header[what]["hash"], new.header[what]["hash"]
        if before != after:
            raise BadInput(f"the runs do not compare: {what} {before} in the old one, {after} in the new one")
    result = Diff()
    before_all = {(v.cell, v.rule): v for v in old.verdicts}
    after_all = {(v.cell, v.rule): v for v in new.verdicts}
    for key, after_one in after_all.items():
        if key not in before_all:
            continue
        before_one = before_all[key]
        if _state(before_one) == _state(after_one):
            continue
        change = Change(cell=key[0], rule=key[1], old=_state(before_one), new=_state(after_one))
        ranks = (_rank(before_one), _rank(after_one))
        (result.worse if ranks[1] > ranks[0] else result.better if ranks[1] < ranks[0] else result.other).append(change)
    result.only_old = len(before_all.keys() - after_all.keys())
    result.only_new = len(after_all.keys() - before_all.keys())
    return result


def _state(verdict: Verdict) -> str:
    # Two deviations within the tolerance count as equal: their digits depend on the machine.
    if verdict.status == "pass":
        return "exact" if verdict.met == "exact" else "within tolerance"
    return verdict.status


def _rank(verdict: Verdict) -> int:
    if verdict.status == "pass":
        return 0 if verdict.met == "exact" else 1
    return 3 if verdict.status in BAD else 2
