"""A value of a framework's configuration, with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """`name` is the framework's own; `source` is a file and line, `default of …` or `derived: …`.

    `known` is false for text that only the framework or a shell could compute.
    """

    name: str
    value: Any
    source: str
    known: bool = True

    @property
    def given(self) -> bool:
        """Whether a file or the command line gives it."""
        return not self.source.startswith(("default", "derived"))
