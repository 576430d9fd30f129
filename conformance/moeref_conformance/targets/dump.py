"""`dump:DIR`: records of a run that happened elsewhere, judged without an adapter.

`DIR/<cell id with __ for />/` holds either `rank0003/` folders as `recorder.py` and `run --keep` write them, or `hf/`,
the safetensors folder that a framework exported. `DIR/manifest.json` may name who made them: {"name": …, "version": …}.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from moeref_conformance.contract.api import FACETS, Cell, Claims, Info, Session, Unsupported, World
from moeref_conformance.contract.checks import BadInput, check_keys
from moeref_conformance.contract.published_models import published
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.rules import load_rules

HF = "hf"


@dataclass(frozen=True, kw_only=True)
class DumpClaims(Claims):
    """A dump claims the cells that it has."""

    cells: frozenset[str] = frozenset()

    def why_not(self, cell: Cell) -> str | None:
        """None for a cell with a folder of its own."""
        return None if cell.id in self.cells else "the dump has no folder of this cell"


def _family(cell: str) -> str:
    """The family in a cell's id, which begins with it or with the name of a published model."""
    name = cell.partition("/")[0].partition("+")[0]
    return str(published()[name].axes["family"]) if name in published() else name


class DumpTarget:
    """A target with records in place of sessions. Raises BadInput for a folder without cells, or with other folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise BadInput(f"dump {folder}: no such folder")
        cells = {path.name.replace("__", "/"): path for path in sorted(folder.iterdir()) if path.is_dir()}
        for path in cells.values():
            if not (path / HF).is_dir() and not any(path.glob("rank[0-9]*/events.jsonl")):
                raise BadInput(f"dump {folder}: {path.name} has neither {HF}/ nor rank0000/events.jsonl")
        if not cells:
            raise BadInput(f"dump {folder}: no folder of a cell, such as qwen3_moe__tp2__gloo")
        self.cells = cells
        self._steps: dict[str, frozenset[str]] = {}
        self.info = self._info()
        self.claims = DumpClaims(
            facets=frozenset(FACETS),
            families=frozenset(map(_family, cells)),
            backends=frozenset({"gloo"}),
            cells=frozenset(cells),
        )

    def _info(self) -> Info:
        path = self.folder / "manifest.json"
        if not path.exists():
            return Info(name=f"dump:{self.folder.name}", version="unknown")
        try:
            manifest = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}: not JSON: {error}") from error
        check_keys(str(path), manifest, ("name", "version"), ("name", "version"))
        return Info(name=str(manifest["name"]), version=str(manifest["version"]))

    def recorded_steps(self, cell: Cell) -> frozenset[str]:
        """Steps that some rank recorded, `hf` where there is an export, and always `close`: to lack it is a failure.

        Every step where a record cannot be read: no rule is unclaimed for that, and running the cell says why.
        """
        if cell.id not in self._steps:
            try:
                self._steps[cell.id] = self._recorded(self.cells[cell.id])
            except BadInput:
                self._steps[cell.id] = frozenset(step for rule in load_rules().values() for step in rule.steps)
        return self._steps[cell.id]

    def _recorded(self, folder: Path) -> frozenset[str]:
        ranks = [RankRecord(0, path) for path in sorted(folder.glob("rank[0-9]*"))]
        steps = {str(event["step"]) for record in ranks for event in record.events} | {"close"}
        return frozenset(steps | {HF} if "export" in steps or (folder / HF).is_dir() else steps)

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        """A dump runs nothing."""
        raise Unsupported(f"{self.info.name} holds records of {cell.id} and cannot run it")
