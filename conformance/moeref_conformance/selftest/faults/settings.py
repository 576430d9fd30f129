"""Calls that leave settings of torch: dtype and device of new tensors, grad mode, and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair
from moeref_conformance.selftest.faults.around import behind
from moeref_conformance.selftest.faults.base import Fault, cell

#: Changes a setting.
Act = Callable[[], object]
_BF16, _FP32 = (partial(torch.set_default_dtype, dtype) for dtype in (torch.bfloat16, torch.float32))
_META, _NO_DEVICE = (partial(torch.set_default_device, device) for device in ("meta", None))
_CAST, _NO_CAST = (partial(torch.set_autocast_enabled, "cpu", on) for on in (True, False))


def _streamed(act: Act) -> border.Change:
    """Every stream ends with `act()`."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        yield from pairs
        act()

    return lambda session, cell, world: border.stream(session, rewrite)


def _opened(act: Act) -> border.Change:
    def wrap(session: Any, cell: Cell, world: World) -> Any:
        act()
        return session

    return wrap


def _until_asked(spoil: border.Change, mend: Act) -> border.Change:
    """What `spoil` leaves stays until the session is asked for a facet: no other rule sees what comes of it."""

    class Mending(border.Swapped):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                mend()
            return super().__getattribute__(name)

    return lambda session, cell, world: Mending(spoil(session, cell, world))


def _no_grad_between_steps(session: Any, cell: Cell, world: World) -> Any:
    """Every training step switches gradients on, and off at its end."""
    good = session.gradients.gradients

    def gradients(tokens_BS: torch.Tensor) -> Any:
        torch.set_grad_enabled(True)
        answer = good(tokens_BS)
        torch.set_grad_enabled(False)
        return answer

    return border.facet(session, "gradients", gradients=gradients)


def _made_under_autocast(session: Any, cell: Cell, world: World) -> Any:
    """The first optimizer is made under autocast, which goes on."""
    made = iter([_CAST])
    return behind("optimizer", "make", lambda chunks: next(made, bool)())(session, cell, world)


def _fault(name: str, bug: str, wrap: border.Change, says: str, *others: str, **axes: bool) -> Fault:
    here, rules = cell("qwen3_moe", "one", **axes), ("RUN-004", *others)
    return Fault(id=name, bug=bug, rules=rules, cell=here, wrap=wrap, one_rank=True, says=says)


FAULTS = (
    _fault(
        "default-dtype-left-by-the-session",
        "reported nowhere: the model is made in bf16, which stays the dtype of all that is made later",
        _until_asked(_opened(_BF16), _FP32),
        "step open left torch.get_default_dtype() at torch.bfloat16",
    ),
    _fault(
        "default-dtype-left-by-a-load",
        "mbridge 76241d2 in kind: a load sets the default dtype, and not what it was",
        _until_asked(behind("export", "load", lambda chunks: _BF16()), _FP32),
        "step load left torch.get_default_dtype() at torch.bfloat16",
        "LOD-007",
    ),
    _fault(
        "default-device-left-by-an-export",
        "AMD-AGI/TraceLens#980 in kind: tensors are described without memory, and so are all that are made later",
        _until_asked(_streamed(_META), _NO_DEVICE),
        "step export left torch.get_default_device() at meta",
        "EXP-014",
    ),
    _fault(
        "autocast-left-on",
        "reported nowhere: autocast is entered where an optimizer is made, and what follows is multiplied in bf16",
        _until_asked(_made_under_autocast, _NO_CAST),
        "step optimizer_made left torch.is_autocast_enabled('cpu') at True",
        optimizer_step=True,
    ),
    _fault(
        "grad-mode-left-off-by-a-step",
        "reported nowhere: a step ends with set_grad_enabled(False), which the next one of its kind undoes",
        _no_grad_between_steps,
        "step gradients left torch.is_grad_enabled() at False",
    ),
)
