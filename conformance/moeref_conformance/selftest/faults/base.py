"""A fault: one real bug as an edit of the good target, with what the kit must say about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moeref_conformance.contract.api import Cell, Layout, Session, World

Rooms = Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """Replace `owner.attribute` by `value` while a session is open."""

    owner: Any
    attribute: str
    value: Any


def none(rooms: Rooms) -> Iterable[Edit]:
    """No edit: the fault is in how the session is used."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One bug. In `cell` its `rules` turn red, and `also` what follows from it, and no other rule.

    `diagnosis` is a part of what is diagnosed in a finding of `rules`, and given wherever a tensor differs; `says` is a
    part of a finding's message. `bug` names the report. `wrap` changes the session instead of moeref's modules.
    `one_rank` says that the fault changes what one rank alone exports or computes; otherwise the one-rank run to
    compare with is the good target's.
    """

    id: str
    bug: str
    rules: tuple[str, ...]
    also: tuple[str, ...] = ()
    cell: Cell
    edits: Callable[[Rooms], Iterable[Edit]] = none
    wrap: Callable[[Session, Cell, World], Session] | None = None
    diagnosis: str = ""
    says: str = ""
    one_rank: bool = False
    deadline: float = 60.0


def cell(family: str, layout_name: str, *, world_size: int = 0, layers: int = 2, **axes: Any) -> Cell:
    """A cell whose layout is named by its sizes: `cell("qwen3_moe", "tp2-ep2")`; more of either by keyword."""
    sizes: dict[str, Any] = {}
    for part in layout_name.split("-") if layout_name != "one" else ():
        name = part.rstrip("0123456789")
        sizes[name] = int(part[len(name) :])
    cell_axes = {k: axes.pop(k) for k in list(axes) if k in Cell.__dataclass_fields__ and k != "layout"}
    layout = Layout(**sizes, world=world_size, **axes)
    return Cell(family=family, layout_name=layout_name, layout=layout, layers=layers, **cell_axes)
