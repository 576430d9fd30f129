"""Targets that misbehave, one a tag: they claim too much, raise, print, hang, die in an export, or return garbage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from moeref_conformance.contract.api import Cell, Info, Session, Unsupported, World
from moeref_conformance.selftest.border import Pair, Swapped, facet, stream
from moeref_conformance.targets.moeref import MoerefTarget


class _Forward:
    """The facet `forward`, which returns `value` as logits, or raises it if it is an exception."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def logits(self, tokens_BS: torch.Tensor) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def _logits(value: Any) -> Callable[[Session, World], Any]:
    return lambda session, world: Swapped(session, forward=_Forward(value))


def _table(rows: Any) -> Callable[[Session, World], Any]:
    return lambda session, world: facet(session, "names", table=lambda rank: rows)


def _streaming(change: Callable[[Iterator[Pair]], Iterator[Any]]) -> Callable[[Session, World], Any]:
    return lambda session, world: stream(session, change)


def _in_export(event: Callable[[], None]) -> Callable[[Session, World], Any]:
    """`event` happens on rank 1 after 20 tensors of its stream."""

    def misbehaves(session: Session, world: World) -> Any:
        def change(pairs: Iterator[Pair]) -> Iterator[Pair]:
            for number, pair in enumerate(pairs):
                if world.rank == 1 and number == 20:
                    event()
                yield pair

        return stream(session, change)

    return misbehaves


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(1)


def _raise() -> None:
    raise RuntimeError("the bucket of model.layers.1 is full")


def _print(session: Session, world: World) -> Session:
    print("x" * 4_000_000, "\x00\xff}{")
    return session


def _arrays(pairs: Iterator[Pair]) -> Iterator[Any]:
    return ((meta, None if tensor is None else np.ones(3)) for meta, tensor in pairs)


MISBEHAVE: Mapping[str, Callable[[Session, World], Any]] = {
    "claims-too-much": _logits(Unsupported("no forward pass here")),
    "facet-is-none": lambda session, world: Swapped(session, forward=None),
    "table-of-none": _table(None),
    "table-of-numbers": _table([1, 2]),
    "empty-table": _table([]),
    "logits-of-another-shape": _logits(torch.zeros(3)),
    "logits-are-a-string": _logits("garbage"),
    "no-logits": _logits(None),
    "stream-of-strings": _streaming(lambda pairs: iter(["garbage"])),
    "stream-of-arrays": _streaming(_arrays),
    "empty-stream": _streaming(lambda pairs: iter(())),
    "dies-in-export": _in_export(_die),
    "hangs-in-export": _in_export(_hang),
    "raises-in-export": _in_export(_raise),
    "prints": _print,
}


class Misbehaving(MoerefTarget):
    """moeref, misbehaving as the cell's tag says."""

    info = Info(name="misbehaving", version="1")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:  # type: ignore[override]
        with super().open(cell, world) as session:
            yield MISBEHAVE[cell.tags[0]](session, world) if cell.tags else session


target = Misbehaving()
