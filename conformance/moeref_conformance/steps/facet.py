"""A facet: its name, its protocol, and its steps.

Every facet of `api.FACETS` has a module of its name in this package, with a `FACET`. A rank and the static world take
their steps from there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.api import FACETS, Cell, Claims, Session, World
from moeref_conformance.contract.backends import ENGINE


class Stage(IntEnum):
    """When a rank takes a step. Within a stage the facets come in the order of `api.FACETS`."""

    OPENED = 0  # at once, so that the coordinates of a rank that fails later are on record
    UNLOADED = 1  # before the checkpoint is loaded
    LOADED = 2
    CHANGED = 3  # once every weight is changed, and after


class Static(Enum):
    """What the static world does with a step."""

    SKIPPED = "skipped"
    ONCE = "once"  # the answer does not depend on the rank
    EVERY_RANK = "every rank"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a step may use besides its facet. `made` caches what several steps or ranks share.

    `gathered` gives what each rank says, by rank: all ranks call it, each time with another name.
    """

    rank: int
    cell: Cell
    world: World
    claims: Claims
    session: Session
    inputs: Mapping[str, str]
    save: Callable[[str, Mapping[str, torch.Tensor]], None]
    folder: Path
    gathered: Callable[[str, str], list[str]] = lambda name, said: [said]
    made: dict[str, Any] = field(default_factory=dict)

    def facet(self, name: str) -> Any:
        """A claimed facet of the session. Raises TypeError if the session has None for it."""
        facet = getattr(self.session, name)
        if facet is None:
            raise TypeError(f"the target claims the facet {name!r} but its session has None for it")
        return facet

    def input(self, name: str) -> Path:
        """A folder or file that the cell is run with, such as `checkpoint`."""
        return Path(self.inputs[name])


@dataclass(frozen=True, kw_only=True)
class Step:
    """One record of a rank. `ask` is called with the facet and the context; its value goes into the record.

    `refusal`: the target must raise, and the ranks go on once all have ended the step.
    """

    name: str
    ask: Callable[[Any, Context], Any]
    stage: Stage = Stage.UNLOADED
    static: Static = Static.SKIPPED
    in_ranks: bool = True
    refusal: bool = False

    def take(self, facet: Facet, context: Context) -> Any:
        """Take the step with the facet of the context's session."""
        return self.ask(context.facet(facet.name), context)


@dataclass(frozen=True, kw_only=True)
class Facet:
    """One facet. `name` is the session's attribute; `needs` are other facets without which it has no steps.

    `claimed`: whether a target that claims the facet claims it in a cell. `serves`: it is of an inference engine, and
    asked in cells that have one; others are asked in all other cells.
    """

    name: str
    protocol: type
    steps: tuple[Step, ...]
    needs: frozenset[str] = frozenset()
    asked_in: Callable[[Cell], bool] = lambda cell: True
    claimed: Callable[[Claims, Cell], bool] = lambda claims, cell: True
    serves: bool = False


def facets() -> tuple[Facet, ...]:
    """All facets, in the order of `api.FACETS`."""
    return tuple(importlib.import_module(f"{__package__}.{name}").FACET for name in FACETS)


def rank_steps(claims: Claims, cell: Cell) -> list[tuple[Facet, Step]]:
    """What a rank does, in order."""
    taken = [(facet, step) for facet, step in _claimed(claims, cell) if step.in_ranks]
    return sorted(taken, key=lambda pair: pair[1].stage)


def static_steps(claims: Claims, cell: Cell, which: Static) -> list[tuple[Facet, Step]]:
    """What the static world does for every rank, or once."""
    return [(facet, step) for facet, step in _claimed(claims, cell) if step.static is which]


def checked_rows(rows: Any, kind: type) -> list[Any]:
    """A target's answer as a list. Raises TypeError, naming what it got, for anything but rows of `kind`.

    Dtypes of rows are text.
    """
    if not isinstance(rows, Iterable):
        raise TypeError(f"expected rows of api.{kind.__name__}, the target gave {rows!r}")
    made = list(rows)
    for row in made:
        if not isinstance(row, kind):
            raise TypeError(
                f"expected rows of api.{kind.__name__}, the target gave a {type(row).__name__}: {row!r:.80}"
            )
        checked_dtype(row)
    return made


def checked_dtype(row: Any) -> None:
    """Raise TypeError if the dtype of a row is no text, of which no record can be made."""
    dtype = getattr(row, "dtype", "")
    if not isinstance(dtype, str):
        raise TypeError(f"expected a dtype as text, such as 'float32', the target gave {dtype!r} in {row!r:.80}")


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call` gives for the arguments, or `{"refused": …}` with the error that it raised and its type."""
    try:
        return call(*arguments)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def refusal(call: Callable[..., Any], *arguments: Any) -> str | None:
    """The error that `call` raised for the arguments, with its type; None if it raised nothing."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _claimed(claims: Claims, cell: Cell) -> Iterable[tuple[Facet, Step]]:
    for facet in facets():
        if (
            facet.serves == (cell.backend == ENGINE)
            and facet.needs | {facet.name} <= claims.facets
            and facet.asked_in(cell)
            and facet.claimed(claims, cell)
        ):
            yield from ((facet, step) for step in facet.steps)
