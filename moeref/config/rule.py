"""What a table of rules is made of: the effective settings as rules read them, and the form of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moeref.config.setting import Setting
from moeref.layout import Layout


class Effective:
    """The effective settings as rules read them; a name that is not set reads as None.

    `facts` are values of a run that are not settings of megatron-core: kernels, norms, experts, replay, parameters,
    and `core`, the minor version of megatron-core.
    """

    def __init__(self, settings: Mapping[str, Setting], layout: Layout, facts: Mapping[str, str] | None = None) -> None:
        self.settings, self.layout, self.facts = settings, layout, facts or {}

    def __getitem__(self, name: str) -> Any:
        if name in self.facts:
            return self.facts[name]
        return self.settings[name].value if name in self.settings else None

    def asked(self, name: str) -> bool:
        """Whether `name` was asked for."""
        return name in self.settings and self.settings[name].asked

    def said(self, *names: str) -> str:
        """`name=value (origin)` of each."""
        return ", ".join(map(self._said, names))

    def _said(self, name: str) -> str:
        if name in self.facts:
            return f"{name}={self[name]!r}"
        return f"{name}={self[name]!r} ({self.settings[name].origin if name in self.settings else 'unset'})"


@dataclass(frozen=True)
class Rule:
    """A combination that is refused. `names` are the settings and facts that the message shows with their values.

    stage: `settings` rules read effective settings only, `run` rules also the facts of a run.
    """

    id: str
    stage: Literal["settings", "run"]
    names: tuple[str, ...]
    text: str
    fix: str
    source: str
    refuses: Callable[[Effective], bool]
