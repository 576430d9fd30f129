"""The choice of a dispatcher: an explicit one is kept or refused, and `auto` follows a fixed order.

megatron-core stores a choice in two fields. Here both are written and read together: Megatron-Bridge once had a
fallback that reset only one (#5207, #5740).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeref.dispatcher.backends import BACKENDS, DEFAULT
from moeref.dispatcher.setup import Choice, DispatcherError, Environment, Setup
from moeref.dispatcher.table import FLEX, Refusal, check, refusals

AUTO = "auto"
#: Up to this etp·ep `auto` prefers all-to-all: megatron-core's maintainers advise it for ep ≤ 8 (Megatron-LM #1456).
#: Reports on HybridEP's speed differ: +14 % (Megatron-LM #2176), −4.2 % (Megatron-Bridge #3561).
SMALL_GROUP = 8


@dataclass(frozen=True)
class Selection:
    """The selected dispatcher, why, and the choices refused before it, each with its reasons."""

    choice: Choice
    why: str
    passed_over: tuple[tuple[Choice, tuple[Refusal, ...]], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """megatron-core's two fields, as the function `settings` gives them."""
        return settings(self.choice)


def settings(choice: Choice) -> dict[str, Any]:
    """megatron-core's `moe_token_dispatcher_type` and `moe_flex_dispatcher_backend` for `choice`, always both.

    The backend is None without flex, because nothing reads it then.
    """
    return {"moe_token_dispatcher_type": choice.dispatcher, "moe_flex_dispatcher_backend": choice.backend_name}


def read(fields: Mapping[str, Any]) -> Choice:
    """The choice in megatron-core's fields, where absent ones have its defaults.

    Fields that contradict one another are refused by the tables, of `config.rules` and of this package. Raises
    DispatcherError for an unknown dispatcher, and for flex with no backend or an unknown one.
    """
    name = str(fields.get("moe_token_dispatcher_type", "allgather"))
    if name == "flex":
        flagged = fields.get("moe_enable_deepep", False)
        name = f"flex-{DEFAULT if flagged else fields.get('moe_flex_dispatcher_backend', DEFAULT)}"
    try:
        return Choice(name)
    except ValueError:
        raise DispatcherError(f"dispatcher {name!r} is none of {', '.join(Choice)}") from None


def automatic(setup: Setup) -> tuple[Choice, ...]:
    """The order of `auto`: all-to-all first in a small group, the backends of flex first in a large one."""
    if setup.layout.etp * setup.layout.ep <= SMALL_GROUP:
        return (Choice.ALLTOALL, Choice.ALLGATHER)
    return (*FLEX, Choice.ALLTOALL, Choice.ALLGATHER)


def select(
    wanted: Choice | str,
    setup: Setup,
    environment: Environment,
    *,
    order: Callable[[Setup], Sequence[Choice]] = automatic,
) -> Selection:
    """The dispatcher for `setup`, whose own dispatcher and backend are ignored.

    A `Choice` (or its name) is kept or refused with DispatcherError, never replaced. "auto" takes the first of
    `order(setup)` that the table accepts, and raises DispatcherError with all reasons if there is none.
    """
    if wanted != AUTO:
        try:
            choice = Choice(wanted)
        except ValueError:
            raise DispatcherError(f"dispatcher {wanted!r} is none of {', '.join(Choice)}, auto") from None
        check(_with(setup, choice), environment)
        return Selection(choice, "asked for")
    passed: list[tuple[Choice, tuple[Refusal, ...]]] = []
    for choice in order(setup):
        found = refusals(_with(setup, choice), environment)
        if not found:
            group = setup.layout.etp * setup.layout.ep
            return Selection(choice, f"auto: the first usable one for a group of etp·ep = {group}", tuple(passed))
        passed.append((choice, found))
    reasons = "\n".join(f"- {choice}: {'; '.join(map(str, found))}" for choice, found in passed)
    raise DispatcherError(f"no dispatcher is left under {setup.layout.text}:\n{reasons}")


def _with(setup: Setup, choice: Choice) -> Setup:
    return replace(setup, dispatcher=choice.dispatcher, backend=choice.backend_name or DEFAULT, enable_deepep=False)


def installed(*, gpu: bool) -> Environment:
    """The environment of this process; the caller gives `gpu`. Imports deep_ep and Transformer Engine if installed.

    Raises importlib.metadata.PackageNotFoundError without megatron-core.
    """
    names = {backend.package: backend.imports for backend in BACKENDS}
    names["transformer_engine"] = (("transformer_engine.pytorch", "Linear"),)
    found = frozenset(package for package, needed in names.items() if all(_has(*name) for name in needed))
    return Environment(core=importlib.metadata.version("megatron-core"), packages=found, gpu=gpu)


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:  # not installed, or a part of it is missing: the table says what needs it
        return False
