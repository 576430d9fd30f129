"""Writes effective settings to a real config object, finalises it, and reads every value back.

The object may be megatron-core's TransformerConfig, a megatron-bridge provider, or anything with the same attributes.
On any error it is restored.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moeref.config.effective import EffectiveSettings, same
from moeref.config.errors import ConfigError, nearest, raise_all
from moeref.config.holder import names_of
from moeref.config.setting import Setting
from moeref.config.settings import ATTRIBUTES

#: Strings that megatron-core replaces by a parsed object.
_PARSED = ("pipeline_model_parallel_layout",)


def apply(record: EffectiveSettings, target: Any, *, optimizer: Any = None, finalise: bool = True) -> EffectiveSettings:
    """Set the record's settings on `target`, finalise it, and return the record of all values it then has.

    Provider defaults are not written: `target` already has them. `finalise` calls the target's `finalize()`, or else
    the `__post_init__` of a dataclass, where Megatron derives and validates. With an optimizer, `grad_scale_func` is
    set to `optimizer.scale_loss`.

    Raises ConfigError and restores `target` for a name that it lacks (the message suggests the nearest), a value that
    it refuses or ignores, a provider default that it no longer has, and values that Megatron refuses when finalised.
    """
    writes = {n: s for n, s in record.by_name.items() if s.origin != "provider default"}
    if optimizer is not None:
        if not callable(getattr(optimizer, "scale_loss", None)):
            raise ConfigError(f"{type(optimizer).__name__} has no scale_loss to be grad_scale_func")
        writes["grad_scale_func"] = Setting(optimizer.scale_loss, "derived", "the optimizer's scale_loss")
        record = record.with_settings({"grad_scale_func": writes["grad_scale_func"]})
    known = (names_of(target) or frozenset()) | ATTRIBUTES
    title = type(target).__name__
    gone = {n for n, s in writes.items() if n not in known and s.origin == "default"}
    raise_all(title, [f"it has no {n}{nearest(n, known)}" for n in writes if n not in known | gone])
    with _undone_on_error(target):
        problems = []
        for name, setting in writes.items():
            if name in gone:
                continue
            try:
                setattr(target, name, setting.value)
            except (AttributeError, TypeError, ValueError) as error:
                problems.append(f"{name}={setting.value!r} cannot be set: {error}")
                continue
            held = getattr(target, name)
            if not same(held, setting.value):
                problems.append(f"{name}={setting.value!r} ({setting.origin}) is swallowed: it holds {held!r}")
        raise_all(title, problems)
        if finalise:
            _finalise(record, target)
        kept = replace(record, trails={n: t for n, t in record.trails.items() if n not in gone})
        return replace(read_back(kept, target), unchecked=())


def read_back(record: EffectiveSettings, target: Any) -> EffectiveSettings:
    """The record updated to the values of `target`: changed values are `derived`, new names `provider default`.

    Megatron may replace None by a value, a string by its parsed form, the name of an enum member by the member, and a
    negative capacity factor by None. Raises ConfigError for any other change of a value that is neither a provider
    default nor derived, and for a name that `target` lacks.
    """
    problems, found = [], {}
    known, settings = names_of(target) or frozenset(), record.by_name
    for name in sorted(known | record.trails.keys()):
        if name not in known and not hasattr(target, name):
            problems.append(f"it has no {name}{nearest(name, known)}")
            continue
        held = getattr(target, name)
        if name not in record:
            found[name] = Setting(held, "provider default")
            continue
        setting = settings[name]
        if same(held, setting.value):
            continue
        if reason := _derived(name, setting, held):
            found[name] = Setting(held, "derived", reason)
        else:
            problems.append(f"{name}={setting.value!r} ({setting.origin}) did not arrive: it holds {held!r}")
    raise_all(type(target).__name__, problems)
    return record.with_settings(found)


def _derived(name: str, setting: Setting, held: Any) -> str:
    """Why Megatron may have changed the value it was given; "" if it may not."""
    if setting.origin in ("provider default", "derived"):
        return "set by Megatron when it was finalised"
    if setting.value is None:
        return "Megatron reads None as 'derive it'"
    if name in _PARSED and isinstance(setting.value, str):
        return "parsed by Megatron"
    given = setting.value if isinstance(setting.value, list) else [setting.value]
    holds = held if isinstance(held, list) else [held]
    if len(given) == len(holds) and all(_names(h, g) for h, g in zip(holds, given, strict=True)):
        return "the enumeration that this names"
    # megatron-core replaces a negative capacity factor by None.
    if name == "moe_expert_capacity_factor" and held is None and setting.value < 0:
        return "negative means no capacity"
    return ""


def _names(held: Any, given: Any) -> bool:
    return same(held, given) or (isinstance(held, enum.Enum) and given in (held.name, held.value))


def _finalise(record: EffectiveSettings, target: Any) -> None:
    """Run Megatron's derivation and validation; an error becomes a ConfigError that lists what was asked for."""
    action = getattr(target, "finalize", None)
    if not callable(action):
        action = getattr(target, "__post_init__", None) if dataclasses.is_dataclass(target) else None
    if action is None:
        return
    try:
        action()
    except (ValueError, AssertionError, TypeError, NotImplementedError) as error:
        given = {n: s.value for n, s in record.by_name.items() if s.asked}
        raise ConfigError(f"{type(target).__name__} refuses these settings: {error}; asked for: {given}") from error


@contextmanager
def _undone_on_error(target: Any) -> Iterator[None]:
    """Restore the attributes of `target` if the block raises."""
    before: Mapping[str, Any] = {
        name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in vars(target).items()
    }
    try:
        yield
    except BaseException:
        vars(target).clear()
        vars(target).update(before)
        raise
