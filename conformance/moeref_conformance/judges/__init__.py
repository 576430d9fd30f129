"""Judges: one pure function per rule, from the records of a cell to findings. Here are their types and registry.

`JUDGES` maps a rule id to its judge; the first look at it imports the modules that hold them, and with them torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moeref_conformance.contract.findings import Finding, Outcome, merged

if TYPE_CHECKING:
    from moeref_conformance.contract.api import Cell, Claims
    from moeref_conformance.contract.records import Observation
    from moeref_conformance.oracles.expected import Expected


@dataclass
class Case:
    """What a judge may read. `baseline` is the one-rank run of the same variant, `claims` are the target's.

    `made` caches what several judges derive from the rest.
    """

    cell: Cell
    expected: Expected | None
    observation: Observation | None
    baseline: Observation | None
    claims: Claims
    made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


class Untested(Exception):
    """Raised by a judge that has nothing to judge by, with the reason."""


Judge = Callable[[Case], Outcome]
_REGISTRY: dict[str, Judge] = {}
if TYPE_CHECKING:
    JUDGES: dict[str, Judge] = _REGISTRY
#: Findings kept of one rule in one cell.
MOST = 20


def judges(rule: str, *, exact: bool = False) -> Callable[[Callable[[Case], Outcome | Iterable[Finding]]], Judge]:
    """Register a function as the judge of a rule; ValueError if the rule has one.

    It yields findings, or returns an Outcome where there is more to say. If `exact`, numbers are compared bit for bit.
    """

    def register(function: Callable[[Case], Outcome | Iterable[Finding]]) -> Judge:
        if rule in _REGISTRY:
            raise ValueError(f"rule {rule} has two judges: {_REGISTRY[rule].__name__} and {function.__name__}")

        @functools.wraps(function)
        def judge(case: Case) -> Outcome:
            try:
                answer = function(case)
                if isinstance(answer, Outcome):
                    return answer
                return Outcome(findings=grouped(answer), met="exact" if exact else "")
            except Untested as reason:
                return Outcome(untested=str(reason))

        _REGISTRY[rule] = judge
        return judge

    return register


def grouped(findings: Iterable[Finding], most: int = MOST) -> tuple[Finding, ...]:
    """One finding for each pattern, which stands for all of it; at most `most`, and how many more there are."""
    patterns: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        patterns.setdefault(finding.pattern, []).append(finding)
    kept = [merged(group) for group in list(patterns.values())[:most]]
    if left := sum(len(group) for group in list(patterns.values())[most:]):
        kept[-1] = replace(kept[-1], message=f"{kept[-1].message} … and {left} more of other patterns")
    return tuple(kept)


def __getattr__(name: str) -> dict[str, Judge]:
    if name != "JUDGES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _REGISTRY
