"""The names, values and types of the settings in an object: a dataclass, its class, or a provider.

Nothing here depends on Megatron: names, defaults and choices are read from the object, so they are those of the
installed version.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from moeref.config.setting import Setting


def names_of(holder: object) -> frozenset[str] | None:
    """The names of all settings of `holder`; None for a mapping, which may be incomplete, and for None."""
    if holder is None or isinstance(holder, Mapping):
        return None
    if dataclasses.is_dataclass(holder):
        return frozenset(f.name for f in dataclasses.fields(holder))
    if isinstance(holder, type):
        return frozenset(n for n in dir(holder) if not n.startswith("_") and not callable(getattr(holder, n)))
    return frozenset(vars(holder))


def held_by(holder: object) -> dict[str, Setting]:
    """The values of `holder`; for a dataclass type its defaults, without required fields."""
    if holder is None:
        return {}
    if isinstance(holder, Mapping):
        values: dict[str, Any] = {str(k): v for k, v in holder.items()}
    elif isinstance(holder, type) and dataclasses.is_dataclass(holder):
        values = {}
        for f in dataclasses.fields(holder):
            if f.default is not dataclasses.MISSING:
                values[f.name] = f.default
            elif f.default_factory is not dataclasses.MISSING:
                values[f.name] = f.default_factory()
    else:
        values = {name: getattr(holder, name) for name in sorted(names_of(holder) or ())}
    return {name: Setting(value, "provider default") for name, value in values.items()}


def unfit(holder: object, name: str, value: Any) -> str:
    """Why `value` does not match the annotation of `name`; "" if it does.

    Only annotations of a bool, an int, a float or a Literal are checked. None is accepted everywhere, because Megatron
    may read it as "derive it".
    """
    if value is None or holder is None or isinstance(holder, Mapping):
        return ""
    annotation = _annotation(holder if isinstance(holder, type) else type(holder), name)
    kinds = _parts(annotation)
    if kinds == [bool] and not isinstance(value, bool):
        return f"{name}={value!r} is neither True nor False"
    if kinds in ([int], [float]) and (isinstance(value, bool) or not isinstance(value, (int, *kinds))):
        return f"{name}={value!r} is no {'integer' if kinds == [int] else 'number'}"
    choices = _choices(annotation)
    if choices and value not in choices:
        return f"{name}={value!r} is none of {', '.join(map(repr, choices))}"
    return ""


def _annotation(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        found = inspect.get_annotations(base).get(name)
        if found is not None:
            if not isinstance(found, str):
                return found
            try:
                return typing.get_type_hints(base).get(name)
            except (NameError, AttributeError):  # the annotation names something imported for type checkers only
                return None
    return None


def _parts(annotation: Any) -> list[Any]:
    """The types that an annotation allows besides None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for part in typing.get_args(annotation) if part is not type(None)]
    return [annotation]


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal or an optional Literal; empty for any other annotation."""
    parts = _parts(annotation)
    if all(typing.get_origin(part) is typing.Literal for part in parts):
        return tuple(value for part in parts for value in typing.get_args(part))
    return ()
