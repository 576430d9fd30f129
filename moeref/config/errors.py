"""The exception of this package, and the suggestion for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Settings that are unknown, contradict one another, or do not reach the config.

    The message has every problem, `problems` has them one by one.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the known name most similar to `name`, or ""."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def raise_all(what: str, problems: list[str]) -> None:
    """Raise one ConfigError with all `problems`, if there are any."""
    if problems:
        raise ConfigError(f"{what}: " + "\n  ".join(problems), problems)
