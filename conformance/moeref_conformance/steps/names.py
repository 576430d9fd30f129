"""Facet `names`: the names table of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import NameRow, Names
from moeref_conformance.steps.facet import Context, Facet, Static, Step, checked_rows


def table(names: Names, context: Context) -> tuple[NameRow, ...]:
    """The table of the context's rank."""
    shared: SharedTables = context.made.setdefault("tables", SharedTables())
    return shared.kept(names.table(context.rank))


class SharedTables:
    """Tables as tuples, equal ones stored once: in the static world thousands of ranks have few different tables."""

    def __init__(self) -> None:
        self._tables: dict[tuple[NameRow, ...], tuple[NameRow, ...]] = {}
        self._given: dict[int, tuple[tuple[NameRow, ...], tuple[NameRow, ...]]] = {}

    def kept(self, given: Any) -> tuple[NameRow, ...]:
        """The table to keep for `given`. Raises TypeError, naming what it got, for anything but rows of NameRow."""
        # A tuple that came before and is still held cannot have changed; anything else is compared.
        if id(given) in self._given:
            return self._given[id(given)][1]
        rows = tuple(_hashable(row) for row in checked_rows(given, NameRow))
        kept = self._tables.setdefault(rows, rows)
        if type(given) is tuple:
            self._given[id(given)] = given, kept
        return kept


def _hashable(row: NameRow) -> NameRow:
    for name in ("local", "global_name", "dtype"):
        if not isinstance(getattr(row, name), str):
            raise TypeError(f"api.NameRow of {row.local!r}: {name} is {getattr(row, name)!r}, not a str")
    good = type(row.hf) is tuple and type(row.shape) is tuple
    return row if good else replace(row, hf=tuple(row.hf), shape=tuple(row.shape))


FACET = Facet(name="names", protocol=Names, steps=(Step(name="names", ask=table, static=Static.EVERY_RANK),))
