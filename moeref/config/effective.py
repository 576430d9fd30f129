"""Effective settings: every value, what it replaced and why, and the differences from what was asked for."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moeref.config.setting import Setting
from moeref.config.user_config import MoEConfig


@dataclass(frozen=True)
class Difference:
    """A setting whose effective value is not the one asked for."""

    name: str
    asked: Any
    effective: Setting

    def __str__(self) -> str:
        why = f": {self.effective.reason}" if self.effective.reason else ""
        return f"{self.name}: asked {self.asked!r}, effective {self.effective.value!r} ({self.effective.origin}{why})"


@dataclass(frozen=True)
class EffectiveSettings:
    """Effective settings with their origins.

    `trails` has all values of a name, from the weakest to the effective one. `unchecked` are the pass-through names
    that were not compared with the names of a provider; `moeref.config.apply` does that.
    """

    asked: MoEConfig
    trails: Mapping[str, tuple[Setting, ...]]
    unchecked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "trails", MappingProxyType(dict(self.trails)))

    def __getitem__(self, name: str) -> Any:
        """The effective value. Raises KeyError for an unknown name."""
        return self.trails[name][-1].value

    def __contains__(self, name: object) -> bool:
        return name in self.trails

    @property
    def by_name(self) -> dict[str, Setting]:
        """The effective setting of every name."""
        return {name: trail[-1] for name, trail in self.trails.items()}

    @property
    def values(self) -> dict[str, Any]:
        """The effective value of every name, as keyword arguments of a constructor."""
        return {name: trail[-1].value for name, trail in self.trails.items()}

    def origin(self, name: str) -> str:
        """Where the effective value comes from."""
        return self.trails[name][-1].origin

    def diff(self) -> tuple[Difference, ...]:
        """The settings whose effective value is not the one asked for: overridden fields, derived values."""
        asked = (*self.asked.fields.items(), *self.asked.transformer_config_kwargs.items())
        effective = ((name, value, self.trails[name][-1]) for name, value in asked)
        return tuple(Difference(name, value, now) for name, value, now in effective if not same(now.value, value))

    def with_settings(self, more: Mapping[str, Setting]) -> EffectiveSettings:
        """These settings with `more`, which take precedence."""
        trails = {**self.trails, **{name: (*self.trails.get(name, ()), setting) for name, setting in more.items()}}
        return replace(self, trails=trails)

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready values: settings with origin, reason and the values they replaced, and `diff`."""
        settings = {}
        for name, trail in sorted(self.trails.items()):
            entry: dict[str, Any] = {"value": plain(trail[-1].value), "origin": trail[-1].origin}
            if trail[-1].reason:
                entry["reason"] = trail[-1].reason
            if len(trail) > 1:
                entry["replaced"] = [{"value": plain(s.value), "origin": s.origin} for s in trail[:-1]]
            settings[name] = entry
        return {"settings": settings, "diff": [str(d) for d in self.diff()]}


def same(one: Any, other: Any) -> bool:
    """Equality in which True is not 1."""
    return one is other or (isinstance(one, bool) == isinstance(other, bool) and bool(one == other))


def plain(value: Any) -> Any:
    """A JSON-ready value; dtypes, functions and other objects become strings without memory addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, enum.Enum) else value.name
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, functools.partial):
        arguments = [*(str(plain(a)) for a in value.args), *(f"{k}={plain(v)}" for k, v in value.keywords.items())]
        return f"{plain(value.func)}({', '.join(arguments)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text
