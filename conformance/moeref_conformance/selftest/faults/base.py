"""A fault: one real bug brought back at the border of the good target's session, and what the kit must say about it.

A benign target (`selftest.benign`) is another variant of the good one, which no rule may call wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from moeref_conformance.contract.api import Cell, Layout, Session, World


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The good target, changed at its border, and the cell that shows it.

    `wrap` gets the good session and gives the other one (see `selftest.border`). `given` changes the cell and the world
    that the good target is opened with. `patch` is entered around the session, for changes in how Megatron itself is
    used: it changes megatron-core's or torch's public API. `one_rank` says that the change also shows in what a single
    rank exports or computes; otherwise the one-rank run to compare with is the good target's. `claims` are what it
    claims other than the good target.
    """

    id: str
    cell: Cell
    wrap: Callable[[Session, Cell, World], Session] | None = None
    given: Callable[[Cell, World], tuple[Cell, World]] | None = None
    patch: Callable[[Cell, World], AbstractContextManager[Any]] | None = None
    one_rank: bool = False
    claims: Mapping[str, Any] = field(default_factory=dict)
    deadline: float = 150.0


@dataclass(frozen=True, kw_only=True)
class Fault(Variant):
    """One bug. In `cell` its `rules` fail, the rules `also` fail as a consequence, and no other rule does.

    `diagnosis` is part of the diagnosis of a finding of `rules`; it is set wherever a tensor differs. `says` is part of
    a finding's message. `bug` names the report.
    """

    bug: str
    rules: tuple[str, ...]
    also: tuple[str, ...] = ()
    diagnosis: str = ""
    says: str = ""


def cell(family: str, layout_name: str, *, world_size: int = 0, layers: int = 2, **axes: Any) -> Cell:
    """A cell with the layout of that name, `cell("qwen3_moe", "tp2-ep2")`; other axes and sizes by keyword."""
    sizes: dict[str, Any] = {}
    for part in layout_name.split("-") if layout_name != "one" else ():
        name = part.rstrip("0123456789")
        sizes[name] = int(part[len(name) :])
    cell_axes = {k: axes.pop(k) for k in list(axes) if k in Cell.__dataclass_fields__ and k != "layout"}
    layout = Layout(**sizes, world=world_size, **axes)
    return Cell(family=family, layout_name=layout_name, layout=layout, layers=layers, **cell_axes)
