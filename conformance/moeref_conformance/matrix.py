"""Matrix files: which cells there are, in which order, under which rules, and which are left out for what reason.

schema = 1
name = "cpu"
[layouts]                                   # tables with the fields of `api.Layout` and `layers`, or its text form
tp2-ep2 = { tp = 2, ep = 2 }
[[grid]]                                    # the product of its lists
layout = ["tp2-ep2"]
family = ["qwen3_moe", "glm4_moe"]          # or size = ["kimi-k2"], published models, in world static
rules = ["EXP"]                             # optional: only rules with these prefixes
gradients = false                           # optional: no training step, which costs about a third of a cell's time
[[exclude]]
where = { layout = "tp2-ep2", family = "glm4_moe" }
reason = "..."                              # mandatory, and the exclusion must match something
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref_conformance.api import Cell, Layout, to_plain
from moeref_conformance.checks import BadInput, check_keys, nearest, read_toml, text_list
from moeref_conformance.rules import WORLDS, load_rules, select
from moeref_conformance.sizes import TINY, published

LAYOUT_KEYS = tuple(f.name for f in fields(Layout))
#: Lists of a grid, in the order in which the product runs (the last varies fastest).
AXES = (
    "world",
    "family",
    "size",
    "dtype",
    "tied",
    "mtp",
    "spelling",
    "norms",
    "experts",
    "dispatcher",
    "replay",
    "layout",
)
CHOICES: dict[str, Iterable[str]] = {
    "world": WORLDS,
    "size": published(),
    "dtype": ("float32", "bfloat16"),
    "spelling": ("per_expert", "fused"),
    "norms": ("apart", "fused"),
    "experts": ("sequential", "grouped"),
}
#: What a published model decides.
OF_SIZE = ("family", "dtype", "tied", "mtp")
LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix file as cells. `rules` holds, by cell id, the rule ids its grid selects."""

    name: str
    path: Path
    cells: tuple[Cell, ...]
    rules: Mapping[str, frozenset[str]]
    excluded: tuple[tuple[str, str], ...]  # (cell id, reason)

    @property
    def hash(self) -> str:
        """Eight hex digits over cells, rules and exclusions; comments and spelling of the file do not count."""
        cells = [[to_plain(cell), sorted(self.rules[cell.id])] for cell in self.cells]
        return hashlib.sha256(json.dumps([self.name, cells, self.excluded]).encode()).hexdigest()[:8]

    def select(self, patterns: Iterable[str]) -> tuple[Cell, ...]:
        """The cells that match one of `patterns` (id, glob over ids, or tag); all of them if there are none.

        Raises `BadInput` for a pattern that matches no cell.
        """
        chosen: set[str] = set()
        patterns = list(patterns)
        for pattern in patterns:
            found = {c.id for c in self.cells if c.id == pattern or fnmatchcase(c.id, pattern) or pattern in c.tags}
            if not found:
                known = [*(c.id for c in self.cells), *(tag for c in self.cells for tag in c.tags)]
                raise BadInput(f"matrix {self.name}: no cell or tag matches {pattern!r}{nearest(pattern, known)}")
            chosen |= found
        return tuple(c for c in self.cells if c.id in chosen or not patterns)


def folder() -> Path:
    """Where the matrices of this kit lie: in the wheel inside the package, in a checkout at the top."""
    shipped = Path(str(files("moeref_conformance"))) / "matrices"
    return shipped if shipped.is_dir() else Path(__file__).resolve().parents[2] / "matrices"


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
    layouts = {name: _layout(f"{where}: layout {name}", entry) for name, entry in data["layouts"].items()}
    cells: dict[str, Cell] = {}
    rules: dict[str, frozenset[str]] = {}
    for number, grid in enumerate(data["grid"], 1):
        spot = f"{where}: grid {number}"
        what = "size" if "size" in grid else "family"
        check_keys(spot, grid, (*AXES, "tags", "rules", "gradients"), ("layout", "world", what))
        _check_size(spot, grid)
        chosen = select(text_list(f"{spot}: rules", grid["rules"]) if "rules" in grid else ())
        if type(grid.get("gradients", True)) is not bool:
            raise BadInput(f"{spot}: gradients={grid['gradients']!r} is not true or false")
        if not grid.get("gradients", True):
            chosen = frozenset(name for name in chosen if "gradients" not in load_rules()[name].facets)
        for cell in _product(where, spot, grid, layouts):
            if cell.id in cells:
                raise BadInput(f"{spot}: cell {cell.id} is already there; a cell belongs to one grid")
            cells[cell.id], rules[cell.id] = cell, chosen
    excluded = _exclude(where, data.get("exclude", []), cells)
    kept = tuple(cell for cell in cells.values() if cell.id not in excluded)
    used = {cell.layout_name for cell in cells.values()}
    for name in layouts:
        if name not in used:
            raise BadInput(f"{where}: layout {name!r} is in no grid")
    if not kept:
        raise BadInput(f"{where}: no cell is left")
    return Matrix(name=str(data["name"]), path=path, cells=kept, rules=rules, excluded=tuple(excluded.items()))


def matches(where: Mapping[str, Any], cell: Cell) -> bool:
    """Whether every key of a checked `where` table holds; a list of values means any of them."""
    return all(
        any(_value(cell, key) == v for v in (value if isinstance(value, list) else [value]))
        if key != "cell"
        else any(fnmatchcase(cell.id, v) for v in (value if isinstance(value, list) else [value]))
        for key, value in where.items()
    )


def check_where(where: str, table: Any) -> Mapping[str, Any]:
    """`table` if it is a non-empty table of axes, layout fields, `layers` or `cell` (a glob); else `BadInput`."""
    if not isinstance(table, Mapping) or not table:
        raise BadInput(f"{where}: 'where' must be a non-empty table, for example {{ layout = \"tp2\" }}")
    known = {*AXES, *LAYOUT_KEYS, "layers", "cell"}
    check_keys(f"{where}: where", table, known)
    return table


def _value(cell: Cell, key: str) -> Any:
    # `layout` and `world` name the layout and the world here, not the fields of the same name in `Layout`.
    if key == "layout":
        return cell.layout_name
    return getattr(cell, key) if hasattr(cell, key) else getattr(cell.layout, key)


def _check_size(where: str, grid: Mapping[str, Any]) -> None:
    given = [axis for axis in OF_SIZE if axis in grid]
    if "size" in grid and given:
        raise BadInput(f"{where}: {', '.join(given)} cannot go with size, a published model decides that")
    if "size" in grid and grid["world"] not in ("static", ["static"]):
        raise BadInput(f'{where}: size needs world = "static"; published models have no weights here')


def _layout(where: str, entry: Any) -> tuple[Layout, int | None]:
    """A layout, and the number of layers that it asks of a tiny model."""
    table = _from_text(where, entry) if isinstance(entry, str) else entry
    if not isinstance(table, Mapping):
        raise BadInput(f"{where}: expected a table or a text form such as 'tp=2,ep=2'")
    check_keys(where, table, (*LAYOUT_KEYS, "layers"))
    for key, value in table.items():
        kind = str if key == "layout" else bool if key in ("embedding", "loss") else int
        if type(value) is not kind:
            raise BadInput(f"{where}: {key}={value!r} is not {'an' if kind is int else 'a'} {kind.__name__}")
    try:
        layout = Layout(**{k: v for k, v in table.items() if k != "layers"})
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error
    for what, size in (
        ("tp·pp·cp", layout.tp * layout.pp * layout.cp),
        ("etp·ep·pp", layout.expert_tp * layout.ep * layout.pp),
    ):
        if layout.world % size:
            raise BadInput(f"{where}: world={layout.world} is not a multiple of {what}={size}")
    if layout.vpp > 1 and layout.pp == 1:
        raise BadInput(f"{where}: vpp={layout.vpp} needs pp of at least 2")
    return layout, table.get("layers")


def _check_split(where: str, cell: Cell) -> None:
    layout = cell.layout
    if layout.layout is None and layout.first is None and layout.last is None:
        counted = cell.layers + layout.embedding + layout.loss
        if counted % (layout.pp * layout.vpp):
            raise BadInput(f"{where}: {counted} layers do not divide over pp·vpp={layout.pp * layout.vpp} stages")


def _from_text(where: str, text: str) -> dict[str, Any]:
    # `layout=` comes last because megatron-core's layout strings contain commas.
    head, _, tail = text.partition("layout=")
    table: dict[str, Any] = {"layout": tail} if tail else {}
    for part in filter(None, (p.strip() for p in head.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not value.isdigit():
            raise BadInput(f"{where}: {part!r} is not key=number")
        table[key] = bool(int(value)) if key in ("embedding", "loss") else int(value)
    return table


def _product(
    file: str, where: str, grid: Mapping[str, Any], layouts: Mapping[str, tuple[Layout, int | None]]
) -> Iterable[Cell]:
    tags = tuple(text_list(f"{where}: tags", grid["tags"])) if "tags" in grid else ()
    values: dict[str, list[Any]] = {}
    for axis in (axis for axis in AXES if axis in grid):
        raw = grid[axis]
        single = {"tied": bool, "mtp": int}.get(axis)
        values[axis] = (
            text_list(f"{where}: {axis}", raw) if single is None else [raw] if isinstance(raw, single) else raw
        )
        known = layouts if axis == "layout" else CHOICES.get(axis)
        for value in values[axis]:
            if axis == "tied" and not isinstance(value, bool):
                raise BadInput(f"{where}: tied={value!r} is not true or false")
            if axis == "mtp" and (type(value) is not int or value < 0):
                raise BadInput(f"{where}: mtp={value!r} is not a number of layers")
            if known is not None and value not in known:
                raise BadInput(f"{where}: unknown {axis} {value!r}{nearest(value, known)}")
    for combination in itertools.product(*values.values()):
        fields_ = dict(zip(values, combination, strict=True))
        name = fields_.pop("layout")
        layout, layers = layouts[name]
        if "size" in fields_:
            if layers is not None:
                raise BadInput(f"{file}: layout {name}: layers={layers} cannot go with size={fields_['size']}")
            fields_ |= published()[fields_["size"]].axes
        else:
            fields_["layers"] = LAYERS if layers is None else layers
        cell = Cell(layout_name=name, layout=layout, gradients=grid.get("gradients", True), tags=tags, **fields_)
        _check_split(f"{file}: layout {name}" + (f" with {cell.size}" if cell.size != TINY else ""), cell)
        yield cell


def _exclude(where: str, entries: Iterable[Any], cells: Mapping[str, Cell]) -> dict[str, str]:
    excluded: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        spot = f"{where}: exclude {number}"
        check_keys(spot, entry, ("where", "reason"), ("where", "reason"))
        if not isinstance(entry["reason"], str) or not entry["reason"].strip():
            raise BadInput(f"{spot}: the reason is empty")
        table = check_where(spot, entry["where"])
        found = [cell.id for cell in cells.values() if matches(table, cell)]
        if not found:
            raise BadInput(f"{spot}: where={dict(table)} matches no cell")
        excluded |= dict.fromkeys(found, entry["reason"])
    return excluded
