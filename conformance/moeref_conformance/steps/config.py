"""Steps of the facet `config`: what the model is given, what its modules hold, and what becomes of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moeref_conformance.contract.api import Config, Request
from moeref_conformance.contract.requests.config import OF_THE_REFERENCE, REQUESTS, same


def recorded(config: Config, chunks: Sequence[Any] | None) -> dict[str, Any]:
    """What was given, what each different config of the modules holds, and every request's answer.

    An answer is what changes against the request for nothing, or the text of the refusal.
    """
    base = _values(config.resolve(Request(), "policy"))
    answers: dict[str, Any] = {}
    for name, request in REQUESTS.items():
        answers[name] = _answer(config, request, "policy", base)
    reference = {name: _answer(config, REQUESTS[name], "reference", base) for name in ("nothing", OF_THE_REFERENCE)}
    held = None if chunks is None else held_by(chunks)
    return {
        "given": _values(config.given()),
        "nothing": base,
        "requests": answers,
        "reference": reference,
        "held": held,
    }


def held_by(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The plain values of every config object in the modules, each object once, with the module that came first."""
    found: dict[int, dict[str, Any]] = {}
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            config = getattr(module, "config", None)
            if dataclasses.is_dataclass(config) and id(config) not in found:
                values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
                found[id(config)] = {"module": f"{number}:{name}", "values": _values(values)}
    return list(found.values())


def _answer(config: Config, request: Request, role: str, base: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values = _values(config.resolve(request, role))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    changed = {k: v for k, v in values.items() if k not in base or not same(base[k], v)}
    return {"changed": changed, "gone": sorted(base.keys() - values.keys())}


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are plain: None, bool, numbers, text, and lists of them."""
    return {str(k): list(v) if isinstance(v, tuple) else v for k, v in values.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)
