"""How many cells of a matrix run on which backend on machines with 1, 4, 8 and 2 × 8 GPUs. Nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from moeref_conformance.contract.backends import GPU_BACKENDS
from moeref_conformance.contract.cells import Cell
from moeref_conformance.plan.machine import NEEDS, RECIPES, Machine, concerned, needs

_ALL = frozenset({*NEEDS, *RECIPES, "nccl"})
#: Machines with all packages, by their heading in the table.
MACHINES = {
    "1 GPU": Machine(gpus=("a GPU",), has=_ALL),
    "4 GPUs": Machine(gpus=("a GPU",) * 4, has=_ALL),
    "8 GPUs": Machine(gpus=("a GPU",) * 8, has=_ALL),
    "2 × 8 GPUs under torchrun": Machine(gpus=("a GPU",) * 8, has=_ALL, ranks=16),
}
HEAD = ("what the cells need", "cells", *MACHINES)


def requirements(cells: Iterable[Cell]) -> list[tuple[str, ...]]:
    """Rows of `HEAD`: one for each rarest package that cells for GPUs need, and one for all these cells."""
    for_gpus = [cell for cell in cells if concerned(cell)]
    groups: dict[str, list[Cell]] = {}
    for cell in for_gpus:
        groups.setdefault(words(cell).split(", ")[-1], []).append(cell)
    return [_row(name, group) for name, group in groups.items()] + [_row("together", for_gpus)]


def words(cell: Cell) -> str:
    """What the cell needs besides GPUs, in words."""
    names = ("FP8" if need in RECIPES else NEEDS[need] for need in needs(cell))
    return ", ".join(dict.fromkeys(names)) or "no package more"


def _row(name: str, cells: list[Cell]) -> tuple[str, ...]:
    return (name, str(len(cells)), *(_counts(machine, cells) for machine in MACHINES.values()))


def _counts(machine: Machine, cells: list[Cell]) -> str:
    counts = Counter(_backend(machine, cell) for cell in cells)
    return ", ".join(f"{counts[key]} {key}" for key in (*reversed(GPU_BACKENDS), "untested") if counts[key])


def _backend(machine: Machine, cell: Cell) -> str:
    here = replace(cell, backend=machine.backend(cell))
    return "untested" if machine.lacks(here) else here.backend


def markdown(cells: Iterable[Cell]) -> str:
    """The rows as a Markdown table."""
    rows = [HEAD, ("---", "--:", *["---"] * len(MACHINES)), *requirements(cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
