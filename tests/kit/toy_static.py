"""A target for the static world, which behaves as the cell's tag says."""

from __future__ import annotations

import ctypes
import enum
import os
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from moeref_conformance.contract.api import Cell, Claims, Info, NameRow, World


class Dtype(enum.StrEnum):
    """Text of a class of the target's own."""

    HALF = "bfloat16"


Shape = namedtuple("Shape", ("rows", "columns"))
ROW = NameRow(chunk=0, local="a", global_name="a", hf=("a",), shape=(2, 3), dtype="bfloat16")
ODD = NameRow(chunk=np.int64(0), local="a", global_name="a", hf=("a",), shape=Shape(np.int64(2), 3), dtype=Dtype.HALF)


class Row(NameRow):
    """A row of a class that no other process has to know."""


def hang() -> None:
    while True:
        time.sleep(60)


BEHAVES: dict[str, Callable[[], Any]] = {
    "plain": lambda: [ROW],
    "odd": lambda: [ODD],
    "foreign": lambda: [Row(**vars(ROW))],
    "hangs": hang,
    "exits": lambda: os._exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "leaves": lambda: (_ for _ in ()).throw(SystemExit(0)),
}


class Toy:
    info = Info(name="toy", version="0")
    claims = Claims(facets=frozenset({"names"}), families=frozenset({"toy"}), backends=frozenset({"static"}))

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        print("opened")
        yield SimpleNamespace(names=SimpleNamespace(table=lambda rank: BEHAVES[cell.tags[0]]()))


target = Toy()
