"""Targets that misbehave, one a tag: they claim too much, raise, print, hang, die in an export, or return garbage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from moeref_conformance.contract.api import Cell, Info, Session, Unsupported, World
from moeref_conformance.selftest.faults.rewrite import Rewritten, Swapped
from moeref_conformance.targets.moeref import MoerefTarget


class _Table:
    def __init__(self, rows: Any) -> None:
        self.table = lambda rank: rows


class _Logits:
    def __init__(self, value: Any) -> None:
        self._value = value

    def logits(self, tokens_BS: torch.Tensor) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def _dies(session: Session, world: World) -> Any:
    def stream(good: Iterator[Any]) -> Iterator[Any]:
        for number, pair in enumerate(good):
            if world.rank == 1 and number == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    return Rewritten(session, stream)


def _hangs(session: Session, world: World) -> Any:
    def stream(good: Iterator[Any]) -> Iterator[Any]:
        for number, pair in enumerate(good):
            while world.rank == 1 and number == 20:
                time.sleep(1)
            yield pair

    return Rewritten(session, stream)


def _raises(session: Session, world: World) -> Any:
    def stream(good: Iterator[Any]) -> Iterator[Any]:
        for number, pair in enumerate(good):
            if world.rank == 1 and number == 20:
                raise RuntimeError("the bucket of model.layers.1 is full")
            yield pair

    return Rewritten(session, stream)


def _prints(session: Session, world: World) -> Any:
    print("x" * 4_000_000, "\x00\xff}{")
    return session


MISBEHAVE: dict[str, Any] = {
    "claims-too-much": lambda s, w: Swapped(s, forward=_Logits(Unsupported("no forward pass here"))),
    "facet-is-none": lambda s, w: Swapped(s, forward=None),
    "table-of-none": lambda s, w: Swapped(s, names=_Table(None)),
    "table-of-numbers": lambda s, w: Swapped(s, names=_Table([1, 2])),
    "empty-table": lambda s, w: Swapped(s, names=_Table([])),
    "logits-of-another-shape": lambda s, w: Swapped(s, forward=_Logits(torch.zeros(3))),
    "logits-are-a-string": lambda s, w: Swapped(s, forward=_Logits("garbage")),
    "no-logits": lambda s, w: Swapped(s, forward=_Logits(None)),
    "stream-of-strings": lambda s, w: Rewritten(s, lambda good: iter(["garbage"])),
    "stream-of-arrays": lambda s, w: Rewritten(s, lambda good: ((m, t if t is None else np.ones(3)) for m, t in good)),
    "empty-stream": lambda s, w: Rewritten(s, lambda good: iter(())),
    "dies-in-export": _dies,
    "hangs-in-export": _hangs,
    "raises-in-export": _raises,
    "prints": _prints,
}


class Misbehaving(MoerefTarget):
    """moeref, misbehaving as the cell's tag says."""

    info = Info(name="misbehaving", version="1")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:  # type: ignore[override]
        with super().open(cell, world) as session:
            yield MISBEHAVE[cell.tags[0]](session, world) if cell.tags else session


target = Misbehaving()
