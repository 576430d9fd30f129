"""What changed between two runs of the same rules over the same matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.results import Results, Verdict
from moeref_conformance.contract.statuses import RED

#: How bad a verdict is; every status that is not here is 2.
BADNESS = {"pass": 0, "exact": 0, "within tolerance": 1, **dict.fromkeys((*RED, "error"), 3)}


class Change(NamedTuple):
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
    profiles: list[str] = field(default_factory=list)  # what is said of those that changed

    @property
    def lines(self) -> list[str]:
        """For people, worst first."""
        text = list(self.profiles)
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
    before, after = ({(v.cell, v.rule): _state(v) for v in run.verdicts} for run in (old, new))
    result = Diff(only_old=len(before.keys() - after.keys()), only_new=len(after.keys() - before.keys()))
    for (cell, rule), state in after.items():
        was = before.get((cell, rule), state)
        if was != state:
            gain = BADNESS.get(was, 2) - BADNESS.get(state, 2)
            changes = result.better if gain > 0 else result.worse if gain < 0 else result.other
            changes.append(Change(cell, rule, was, state))
    result.profiles = _profiles(old, new)
    return result


def _profiles(old: Results, new: Results) -> list[str]:
    """`weights 1.0: conforms to … → does not conform to …`, of profiles that the runs do not say the same of."""
    before = {standing.profile: standing for standing in old.headline.standings}
    pairs = [(before[now.profile], now) for now in new.headline.standings if now.profile in before]
    return [f"{was} → {now}" for was, now in pairs if was != now]


def _state(verdict: Verdict) -> str:
    # Two deviations within the tolerance count as equal: their digits depend on the machine.
    if verdict.status == "pass":
        return {"exact": "exact", "": "pass"}.get(verdict.met, "within tolerance")
    return verdict.status
