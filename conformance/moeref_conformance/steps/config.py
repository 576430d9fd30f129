"""Facet `config`: what the model is given, what the configs in its modules hold, and the answers to requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moeref_conformance.contract import activations
from moeref_conformance.contract.api import Config, Request
from moeref_conformance.contract.requests.config import OF_THE_REFERENCE, REQUESTS, same
from moeref_conformance.steps.facet import Context, Facet, Static, Step, answer


def recorded(config: Config, context: Context) -> dict[str, Any]:
    """What was given, what each different config of the modules holds, and the answer to every request.

    An answer is what differs from the answer to the empty request, or the text of the refusal.
    """
    base = _plain_values(config.resolve(Request(), "policy"))

    def changes(request: Request, role: str) -> dict[str, Any]:
        values = _plain_values(config.resolve(request, role))
        changed = {k: v for k, v in values.items() if k not in base or not same(base[k], v)}
        return {"changed": changed, "gone": sorted(base.keys() - values.keys())}

    has_modules = "export" in context.claims.facets and context.world.backend != "static"
    return {
        "given": _plain_values(config.given()),
        "nothing": base,
        "requests": {name: answer(changes, request, "policy") for name, request in REQUESTS.items()},
        "reference": {n: answer(changes, REQUESTS[n], "reference") for n in OF_THE_REFERENCE},
        "held": held_by(context.facet("export").chunks()) if has_modules else None,
        "frequencies": frequencies(context.facet("export").chunks()) if has_modules else [],
    }


def frequencies(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """Inverse frequencies of rotary positions, where modules have them under that name, as Megatron's do."""
    found = list[dict[str, Any]]()
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            for key, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
                if key.startswith("inv_freq") and isinstance(value, torch.Tensor):
                    found.append({"module": f"{number}:{name}.{key}", "values": value.detach().double().tolist()})
    return found


def held_by(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The plain values of every config object in the modules, with the module that came first."""
    held = list[dict[str, Any]]()
    for module, config in configs(chunks):
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        held.append({"module": module, "values": _plain_values(values)})
    return held


def configs(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every config object in the modules once, after `chunk:name` of the first module that has it."""
    seen: set[int] = set()
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            config = getattr(module, "config", None)
            if dataclasses.is_dataclass(config) and not isinstance(config, type) and id(config) not in seen:
                seen.add(id(config))
                yield f"{number}:{name}", config


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain ones of `values`: None, bool, numbers, also numpy's, strings, and lists of them.

    Of functions the activation has a name, by what it computes.
    """
    made = {str(k): v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
    activation = made.get(activations.SETTING)
    if callable(activation):
        name = activations.named(activation)
        made[activations.SETTING] = activation if name is None else name
    return {k: list(v) if isinstance(v, tuple) else v for k, v in made.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


FACET = Facet(name="config", protocol=Config, steps=(Step(name="config", ask=recorded, static=Static.ONCE),))
