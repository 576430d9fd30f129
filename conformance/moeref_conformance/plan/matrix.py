"""Matrix files: which cells there are, in which order, under which rules, and which are excluded for what reason.

schema = 1
name = "cpu"
[layouts]                                   # fields of `cells.Layout` and `layers`, or the text form of a layout
tp2-ep2 = { tp = 2, ep = 2 }
[[grid]]                                    # the product of its lists
layout = ["tp2-ep2"]
backend = ["gloo"]                          # or "gpu": nccl if every rank has a GPU of its own, else gloo-cuda
family = ["qwen3_moe", "glm4_moe"]          # or size = ["kimi-k2"], published models, with backend static
rules = ["EXP"]                             # optional: only rules with these prefixes
gradients = false                           # optional: no training step, which costs about a third of a cell's time
gpus = 8                                    # optional: least number of GPUs
needs = ["fp8"]                             # optional: what the cells need besides what their axes imply
[[exclude]]
where = { layout = "tp2-ep2", family = "glm4_moe" }
reason = "..."                              # mandatory, and the exclusion must match something
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import to_plain
from moeref_conformance.contract.axes import Axis
from moeref_conformance.contract.cells import AXES, Cell, Layout
from moeref_conformance.contract.checks import BadInput, check_keys, check_known, nearest, read_toml, text_list, texts
from moeref_conformance.contract.published_models import TINY, published
from moeref_conformance.contract.rules import load_rules, select
from moeref_conformance.plan.layouts import LAYOUT_KEYS, check_split, read_layout
from moeref_conformance.plan.machine import NEEDS, Machine

#: Axes that a grid lists, in the order in which the product runs: the last varies fastest.
GRID_AXES = sorted(
    (axis for axis in AXES.values() if axis.in_grid),
    key=lambda axis: (axis.name == "layout") - (axis.name == "backend"),
)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix file as cells. `rules` holds, by cell id, the rule ids its grid selects."""

    name: str
    path: Path
    cells: tuple[Cell, ...]
    rules: Mapping[str, frozenset[str]]
    excluded: tuple[tuple[str, str], ...]  # (cell id, reason)
    hash: str  # eight hex digits over cells, rules and exclusions, not over how the file writes them
    in_file: Mapping[str, str] = field(default_factory=dict)  # cell id -> the id before a backend was chosen

    def on(self, machine: Machine, backend: str = "auto") -> Matrix:
        """This matrix with the backend that every cell has on `machine`. `backend` overrides all but static cells.

        Raises `BadInput` where two cells become one.
        """
        cells: dict[str, Cell] = {}
        in_file: dict[str, str] = {}
        for cell in self.cells:
            here = replace(cell, backend=machine.backend(cell, backend))
            if here.id in cells:
                raise BadInput(f"matrix {self.name}: {cell.id} and {in_file[here.id]} would both be {here.id}")
            cells[here.id], in_file[here.id] = here, cell.id
        rules = {cell_id: self.rules[in_file[cell_id]] for cell_id in cells}
        return replace(self, cells=tuple(cells.values()), rules=rules, in_file=in_file)

    def select(self, patterns: Iterable[str]) -> tuple[Cell, ...]:
        """The cells that match one of `patterns` (id, glob over ids, or tag); all of them if there are none.

        An id may name the backend of the file or the chosen one. Raises `BadInput` for a pattern that matches no cell.
        """
        patterns = list(patterns)
        chosen = {cell_id for pattern in patterns for cell_id in self._matching(pattern)}
        return tuple(c for c in self.cells if c.id in chosen or not patterns)

    def _matching(self, pattern: str) -> set[str]:
        matching = {
            cell.id
            for cell in self.cells
            for name in (cell.id, self.in_file.get(cell.id, cell.id))
            if name == pattern or fnmatchcase(name, pattern) or pattern in cell.tags
        }
        if not matching:
            names = [*(c.id for c in self.cells), *(tag for c in self.cells for tag in c.tags)]
            raise BadInput(f"matrix {self.name}: no cell or tag matches {pattern!r}{nearest(pattern, names)}")
        return matching


def _hash(name: str, cells: Iterable[Cell], rules: Mapping[str, frozenset[str]], excluded: Any) -> str:
    counted = [[_counted(cell), sorted(rules[cell.id])] for cell in cells]
    return hashlib.sha256(json.dumps([name, counted, excluded]).encode()).hexdigest()[:8]


def _counted(cell: Cell) -> dict[str, Any]:
    # Fields that are newer than published hashes count only where they are set, so that those hashes hold.
    newer = {axis.field: axis.default for axis in AXES.values() if axis.hashed_if_set} | {"needs": [], "gpus": 0}
    counted = {key: value for key, value in to_plain(cell).items() if key not in newer or value != newer[key]}
    del counted["layout"]["order"]  # a matrix has none
    return counted


def folder() -> Path:
    """The folder of the shipped matrices: inside the package in a wheel, at the top of a checkout."""
    shipped = Path(str(files("moeref_conformance"))) / "matrices"
    return shipped if shipped.is_dir() else Path(__file__).resolve().parents[3] / "matrices"


def load(name_or_path: str) -> Matrix:
    """The matrix in a file, or the shipped one of that name (`cpu`, `smoke`). Raises `BadInput` for anything wrong."""
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        path = folder() / f"{name_or_path}.toml"
        if not path.is_file():
            shipped = [p.stem for p in folder().glob("*.toml")]
            raise BadInput(f"no matrix {name_or_path!r}{nearest(name_or_path, shipped)}; or give a .toml file")
    return parse(read_toml(path), path)


def parse(data: Mapping[str, Any], path: Path) -> Matrix:
    """`load` for parsed TOML; `path` is named in errors."""
    where = path.name
    check_keys(where, data, ("schema", "name", "layouts", "grid", "exclude"), ("schema", "name", "layouts", "grid"))
    if data["schema"] != 1:
        raise BadInput(f"{where}: schema={data['schema']!r}; this kit reads schema 1")
    layouts = {name: read_layout(f"{where}: layout {name}", entry) for name, entry in data["layouts"].items()}
    cells: dict[str, Cell] = {}
    rules: dict[str, frozenset[str]] = {}
    for number, grid in enumerate(data["grid"], 1):
        spot = f"{where}: grid {number}"
        _check_keys(spot, grid)
        chosen = _rules(spot, grid)
        for cell in _product(where, spot, grid, layouts):
            if cell.id in cells:
                raise BadInput(f"{spot}: cell {cell.id} is already there; a cell belongs to one grid")
            cells[cell.id], rules[cell.id] = cell, chosen
    unused = layouts.keys() - {cell.layout_name for cell in cells.values()}
    if unused:
        raise BadInput(f"{where}: layout {min(unused)!r} is in no grid")
    excluded = _exclude(where, data.get("exclude", []), cells)
    kept = tuple(cell for cell in cells.values() if cell.id not in excluded)
    if not kept:
        raise BadInput(f"{where}: no cell is left")
    name, left_out = str(data["name"]), tuple(excluded.items())
    revision = _hash(name, kept, rules, left_out)
    return Matrix(name=name, path=path, cells=kept, rules=rules, excluded=left_out, hash=revision)


def _rules(where: str, grid: Mapping[str, Any]) -> frozenset[str]:
    """The rules that the grid selects; without a training step none that reads its gradients."""
    chosen = select(texts(where, grid, "rules"))
    gradients = grid.get("gradients", True)
    if type(gradients) is not bool:
        raise BadInput(f"{where}: gradients={gradients!r} is not true or false")
    return chosen if gradients else frozenset(n for n in chosen if "gradients" not in load_rules()[n].facets)


def matches(where: Mapping[str, Any], cell: Cell) -> bool:
    """Whether `cell` has the values of a checked `where` table. A list means any of its values."""
    return all(
        any(_has(cell, key, value) for value in (values if isinstance(values, list) else [values]))
        for key, values in where.items()
    )


def _has(cell: Cell, key: str, value: Any) -> bool:
    if key == "cell":
        return fnmatchcase(cell.id, value)
    return bool((AXES[key].of(cell) if key in AXES else getattr(cell.layout, key)) == value)


def check_where(where: str, table: Any) -> Mapping[str, Any]:
    """`table` if it is a non-empty table of axes, layout fields or `cell` (a glob over ids); else `BadInput`."""
    if not isinstance(table, Mapping) or not table:
        raise BadInput(f"{where}: 'where' must be a non-empty table, for example {{ layout = \"tp2\" }}")
    check_keys(f"{where}: where", table, {*AXES, *LAYOUT_KEYS, "cell"})
    return table


def _check_keys(where: str, grid: Mapping[str, Any]) -> None:
    needed = [axis.name for axis in GRID_AXES if axis.required and not (axis.of_size and "size" in grid)]
    check_keys(where, grid, (*(axis.name for axis in GRID_AXES), "tags", "rules", "gradients", "needs", "gpus"), needed)
    given = [axis.name for axis in GRID_AXES if axis.of_size and axis.name in grid]
    if "size" in grid and given:
        raise BadInput(f"{where}: {', '.join(given)} cannot go with size, a published model decides that")
    if "size" in grid and grid["backend"] not in ("static", ["static"]):
        raise BadInput(f'{where}: size needs backend = "static"; published models have no weights here')


def _check_kernels(where: str, cell: Cell) -> None:
    if cell.kernels == "te" and cell.norms != "fused":
        raise BadInput(f'{where}: kernels = "te" needs norms = "fused": that is how Transformer Engine holds them')
    if cell.precision and cell.kernels != "te":
        raise BadInput(f'{where}: precision = "{cell.precision}" needs kernels = "te"')


def _product(
    file: str, where: str, grid: Mapping[str, Any], layouts: Mapping[str, tuple[Layout, int | None]]
) -> Iterator[Cell]:
    more = _beside_axes(where, grid)
    values = {axis: _values(where, axis, grid[axis.name], layouts) for axis in GRID_AXES if axis.name in grid}
    for combination in itertools.product(*values.values()):
        chosen = dict(zip((axis.field for axis in values), combination, strict=True))
        name = chosen["layout_name"]
        layout, layers = layouts[name]
        if "size" in chosen:
            if layers is not None:
                raise BadInput(f"{file}: layout {name}: layers={layers} cannot go with size={chosen['size']}")
            chosen |= published()[chosen["size"]].axes
        elif layers is not None:
            chosen["layers"] = layers
        cell = Cell(layout=layout, **more, **chosen)
        _check_kernels(where, cell)
        check_split(f"{file}: layout {name}" + (f" with {cell.size}" if cell.size != TINY else ""), cell)
        yield cell


def _values(where: str, axis: Axis, listed: Any, layouts: Iterable[str]) -> list[Any]:
    """The values of an axis that a grid lists, or its only one. Raises `BadInput` for what is not a value of it."""
    if axis.default is None or isinstance(axis.default, str):
        values: list[Any] = text_list(f"{where}: {axis.name}", listed)
    else:
        values = listed if isinstance(listed, list) else [listed]
    choices = layouts if axis.name == "layout" else axis.choices
    for value in values:
        if problem := axis.problem(value):
            raise BadInput(f"{where}: {axis.name}={value!r} {problem}")
    check_known(where, axis.name, values, choices or values)
    return values


def _beside_axes(where: str, grid: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the grid's cells that are no axes."""
    tags, needs = texts(where, grid, "tags"), texts(where, grid, "needs")
    check_known(where, "need", needs, NEEDS)
    gpus = grid.get("gpus", 0)
    if type(gpus) is not int or gpus < 0:
        raise BadInput(f"{where}: gpus={gpus!r} is not a number of GPUs")
    return {"tags": tags, "needs": needs, "gpus": gpus, "gradients": grid.get("gradients", True)}


def _exclude(where: str, entries: Iterable[Any], cells: Mapping[str, Cell]) -> dict[str, str]:
    excluded: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        spot = f"{where}: exclude {number}"
        check_keys(spot, entry, ("where", "reason"), ("where", "reason"))
        if not isinstance(entry["reason"], str) or not entry["reason"].strip():
            raise BadInput(f"{spot}: the reason is empty")
        table = check_where(spot, entry["where"])
        matching = [cell.id for cell in cells.values() if matches(table, cell)]
        if not matching:
            raise BadInput(f"{spot}: where={dict(table)} matches no cell")
        excluded |= dict.fromkeys(matching, entry["reason"])
    return excluded
