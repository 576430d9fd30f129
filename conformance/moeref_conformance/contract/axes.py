"""What an axis of a cell is. The axes themselves are fields of `cells.Cell`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a cell: a matrix lists its values under `name`, and a cell holds one of them in `field`.

    `claim` is the field of `Claims` that covers a value: a set of values, a bool, or the largest number. An axis
    without one is always covered.
    """

    name: str
    field: str
    default: Any = None
    required: bool = False  # every grid lists it, or names the size that decides it
    choices: tuple[str, ...] = ()  # empty: any value of the default's type
    about: str = "as the target claims"  # the values in words, where there are no choices
    claim: str = ""
    noun: str = ""  # what a bool allows or a number counts, such as "tied embeddings"
    shown: str = "{}"  # how the cell id shows a value other than the default; empty: elsewhere or not at all
    shown_last: bool = False  # after the other axes
    of_size: bool = False  # a published model (axis `size`) decides it
    in_grid: bool = True  # grids list its values; otherwise they follow from the layout or the size
    hashed_if_set: bool = False  # newer than published matrix hashes, which hold because the default is not hashed

    def of(self, cell: Any) -> Any:
        """The value that `cell` has."""
        return getattr(cell, self.field)

    def text(self, value: Any) -> str:
        """A value as the cell id shows it, such as `mtp1`."""
        return self.shown.format(value)

    def problem(self, value: Any) -> str:
        """What is wrong with the type of a value that a grid lists; empty if nothing is."""
        if isinstance(self.default, bool):
            return "" if isinstance(value, bool) else "is not true or false"
        if isinstance(self.default, int):
            return "" if type(value) is int and value >= 0 else f"is not {self.about}"
        return "" if isinstance(value, str) else "is not a string"

    def uncovered(self, cell: Any, claims: Any) -> str:
        """Why `claims` does not cover the value of `cell`; empty if it does."""
        value, claimed = self.of(cell), getattr(claims, self.claim) if self.claim else True
        if isinstance(claimed, bool):
            return "" if claimed or not value else f"{self.noun} are not claimed"
        if isinstance(claimed, int):
            most = f"at most {claimed} {self.noun} are"
            return "" if value <= claimed else f"{self.name}={value} is not claimed ({most})"
        listed = ", ".join(sorted(filter(None, claimed))) or "none"
        return "" if value in claimed else f"{self.name}={value} is not claimed (claimed: {listed})"


def axis(default: Any = MISSING, **facts: Any) -> Any:
    """A field of a dataclass that is an axis; `name` is the field's unless given."""
    return field(default=default, metadata={"axis": facts})


def read_axes(fields: Iterable[Field[Any]]) -> dict[str, Axis]:
    """The axes among the fields of a dataclass by name, in their order."""
    axes = {}
    for of in fields:
        if "axis" in of.metadata:
            facts = {"name": of.name, **of.metadata["axis"]}
            default = None if of.default is MISSING else of.default
            axes[facts["name"]] = Axis(field=of.name, default=default, **facts)
    return axes
