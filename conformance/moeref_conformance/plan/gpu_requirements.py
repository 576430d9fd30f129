"""How many cells of a matrix run in which world on machines with 1, 4, 8 and 2 × 8 GPUs: counted, nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rich import box
from rich.table import Table

from moeref_conformance.contract.cells import GPU_BACKENDS, Cell
from moeref_conformance.plan.machine import NEEDS, RECIPES, Machine, concerned, needs

_ALL = frozenset({*NEEDS, *RECIPES, "nccl"})
#: Machines with all packages, by what they are called here.
MACHINES = {
    "1 GPU": Machine(gpus=("a GPU",), has=_ALL),
    "4 GPUs": Machine(gpus=("a GPU",) * 4, has=_ALL),
    "8 GPUs": Machine(gpus=("a GPU",) * 8, has=_ALL),
    "2 × 8 GPUs under torchrun": Machine(gpus=("a GPU",) * 8, has=_ALL, ranks=16),
}
HEAD = ("what the cells need", "cells", *MACHINES)


def census(cells: Iterable[Cell]) -> list[tuple[str, ...]]:
    """A row of `HEAD` for each package that cells of GPU worlds need most of all, and one for all of them."""
    everything = [cell for cell in cells if concerned(cell)]
    groups: dict[str, list[Cell]] = {}
    for cell in everything:
        groups.setdefault(words(cell).split(", ")[-1], []).append(cell)
    return [_row(name, group) for name, group in groups.items()] + [_row("together", everything)]


def words(cell: Cell) -> str:
    """What the cell needs besides GPUs, for people."""
    names = ("FP8" if need in RECIPES else NEEDS[need] for need in needs(cell))
    return ", ".join(dict.fromkeys(names)) or "no package more"


def _row(name: str, cells: list[Cell]) -> tuple[str, ...]:
    return (name, str(len(cells)), *(_placed(machine, cells) for machine in MACHINES.values()))


def _placed(machine: Machine, cells: list[Cell]) -> str:
    found = Counter(_world(machine, cell) for cell in cells)
    return ", ".join(f"{found[world]} {world}" for world in (*reversed(GPU_BACKENDS), "untested") if found[world])


def _world(machine: Machine, cell: Cell) -> str:
    here = replace(cell, backend=machine.backend(cell))
    return "untested" if machine.lacks(here) else here.backend


def markdown(cells: Iterable[Cell]) -> str:
    """The census as a Markdown table."""
    rows = [HEAD, ("---", "--:", *["---"] * len(MACHINES)), *census(cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table(cells: Iterable[Cell]) -> Table:
    """The census for a terminal."""
    shown = Table(*HEAD, box=box.SIMPLE, title="cells by the world they would run in")
    for row in census(cells):
        shown.add_row(*row)
    return shown
