"""Layouts as matrix files write them, a table or its text form, and whether layers divide over their stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from moeref_conformance.contract.cells import Cell, Layout
from moeref_conformance.contract.checks import BadInput, check_keys

#: What a matrix says of a layout: all but the order of ranks, which a target claims.
LAYOUT_KEYS = tuple(f.name for f in fields(Layout) if f.name != "order")


def read_layout(where: str, entry: Any) -> tuple[Layout, int | None]:
    """A layout, and the number of layers that it asks of a tiny model. Raises `BadInput` for an impossible one."""
    table = _from_text(where, entry) if isinstance(entry, str) else entry
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table or a text form such as 'tp=2,ep=2'")
    check_keys(where, table, (*LAYOUT_KEYS, "layers"))
    for key, value in table.items():
        kind = _type_of(key)
        if type(value) is not kind:
            raise BadInput(f"{where}: {key}={value!r} is not {'an' if kind is int else 'a'} {kind.__name__}")
    try:
        layout = Layout(**{k: v for k, v in table.items() if k != "layers"})
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error
    _check_sizes(where, layout)
    return layout, table.get("layers")


def _type_of(key: str) -> type:
    return str if key == "pipeline_layout" else bool if key in ("embedding", "loss") else int


def _check_sizes(where: str, layout: Layout) -> None:
    for what, size in (
        ("tp·pp·cp", layout.tp * layout.pp * layout.cp),
        ("etp·ep·pp", layout.expert_tp * layout.ep * layout.pp),
    ):
        if layout.world % size:
            raise BadInput(f"{where}: world={layout.world} is not a multiple of {what}={size}")
    if layout.vpp > 1 and layout.pp == 1:
        raise BadInput(f"{where}: vpp={layout.vpp} needs pp of at least 2")


def check_split(where: str, cell: Cell) -> None:
    """Raise `BadInput` if the layers of `cell` do not divide over equal stages."""
    layout = cell.layout
    if layout.pipeline_layout is None and layout.first is None and layout.last is None:
        counted = cell.layers + layout.embedding + layout.loss
        stages = layout.pp * layout.vpp
        if counted % stages:
            why = f"{counted} layers do not divide over pp·vpp={stages} stages"
            raise BadInput(f"{where}: {why}: give the layout `layers`")


def _from_text(where: str, text: str) -> dict[str, Any]:
    # `pipeline_layout=` comes last: its value may contain commas.
    head, _, tail = text.partition("pipeline_layout=")
    table: dict[str, Any] = {"pipeline_layout": tail} if tail else {}
    for part in filter(None, (p.strip() for p in head.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not value.isdigit():
            raise BadInput(f"{where}: {part!r} is not key=number")
        table[key] = _type_of(key)(int(value))
    return table
