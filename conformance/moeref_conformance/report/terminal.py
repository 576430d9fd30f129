"""What is wrong, for the terminal at the end of a run: the first cause of each red rule, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator

from moeref_conformance.contract.results import Results
from moeref_conformance.contract.texts import cut
from moeref_conformance.report.causes import Failure
from moeref_conformance.report.view import LEGEND, view

#: Rules that are shown, and characters of a text.
MOST, WIDTH = 20, 300


def failures(results: Results) -> list[str]:
    """Lines on every red rule but those that follow from another."""
    red = view(results).red
    lines = [line for failure in red[:MOST] for line in _failure(failure)]
    return lines + [f"and {len(red) - MOST} more red rules, in the report"] * (len(red) > MOST)


def _failure(failure: Failure) -> Iterator[str]:
    first, *others = failure.causes
    symbol, _ = LEGEND[first.verdict.status]
    yield f"{symbol} {failure.rule.id} {_short(first.text)}"
    if finding := first.finding:
        rank = "" if finding.rank is None else f", rank {finding.rank}" + f" ({finding.coords})" * bool(finding.coords)
        if finding.diagnosis:  # else the message is the cause's text
            yield f"    {_short(finding.message)}"
        yield f"    in {first.verdict.cell}{rank}"
    if others:
        yield f"    and {len(others)} more cause{'s' * (len(others) > 1)}"
    if failure.follows:
        yield f"    follows from it: {', '.join(other.rule.id for other in failure.follows)}"
    if first.verdict.repeat:
        yield f"    repeat: {first.verdict.repeat}"


def _short(text: str) -> str:
    return cut(" ".join(text.split()), WIDTH, WIDTH // 3)
