"""What can go wrong with settings, and how a name that nobody knows is answered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Settings that are unknown, contradict one another, or do not arrive. Every problem found is in the message.

    `problems` has them one by one, where there are several.
    """

    problems: tuple[str, ...] = ()


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the known name that is most like `name`, or nothing."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def raise_all(what: str, problems: list[str]) -> None:
    """Raise one ConfigError that tells all `problems`; do nothing if there are none."""
    if problems:
        error = ConfigError(f"{what}: " + "\n  ".join(problems))
        error.problems = tuple(problems)
        raise error
