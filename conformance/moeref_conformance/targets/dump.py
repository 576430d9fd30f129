"""`dump:DIR`: records of a run that happened elsewhere, judged without an adapter.

`DIR/<cell id with __ for />/` holds either `rank0003/` folders as `recorder.py` and `run --keep` write them, or `hf/`,
the safetensors folder that a framework exported. `DIR/manifest.json` may name who made them: {"name": …, "version": …}.
Links are not followed, and only regular files are read.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from moeref_conformance.contract.api import FACETS, Cell, Claims, Info, Session, Unsupported, World
from moeref_conformance.contract.checks import BadInput, NothingRecorded, check_keys, check_name
from moeref_conformance.contract.published_models import published
from moeref_conformance.contract.records import EVENTS, RankRecord
from moeref_conformance.contract.rules import load_rules

HF = "hf"
#: Steps that a rule reads of a facet. A record without any of them says nothing about its target.
TELLING = frozenset(step for rule in load_rules().values() if rule.facets for step in rule.steps)


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


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a rank or an export. Raises BadInput for a link and for what is not a file."""
    return [_check(file, stat.S_ISREG, "a regular file") for file in sorted(_below(folder, "*.safetensors"))]


def record_files(folder: Path) -> list[Path]:
    """`tensor_files` of a rank, and its events."""
    return [*(_check(file, stat.S_ISREG, "a regular file") for file in _below(folder, EVENTS)), *tensor_files(folder)]


def _below(folder: Path, pattern: str) -> Iterable[Path]:
    if not (folder.exists() or folder.is_symlink()):
        return ()
    return _check(folder, stat.S_ISDIR, "a folder").glob(pattern)


def _check(path: Path, kind: Callable[[int], bool], what: str) -> Path:
    if not kind(path.lstat().st_mode):
        raise BadInput(f"dump: {path} is not {what}; links are not followed: put a copy there")
    return path


def _ranks(cell: Path) -> list[Path]:
    return sorted(path for path in cell.glob("rank[0-9]*") if path.is_dir() or path.is_symlink())


class DumpTarget:
    """A target with records in place of sessions.

    Raises BadInput for a folder with other folders than those of cells, and for links, and NothingRecorded for a folder
    without records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise BadInput(f"dump {folder}: no such folder")
        cells = {path.name.replace("__", "/"): path for path in sorted(folder.iterdir()) if path.is_dir()}
        for path in cells.values():
            _check(path, stat.S_ISDIR, "a folder")
            tensor_files(path / HF)
            events = [file for rank in _ranks(path) for file in record_files(rank) if file.name == EVENTS]
            if not (path / HF).is_dir() and not events:
                raise NothingRecorded(f"dump {folder}: {path.name} has neither {HF}/ nor rank0000/{EVENTS}")
        if not cells:
            raise NothingRecorded(f"dump {folder}: no folder of a cell, such as qwen3_moe__tp2__gloo")
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
        if not (path.exists() or path.is_symlink()):
            return Info(name=f"dump:{self.folder.name}", version="unknown")
        _check(path, stat.S_ISREG, "a regular file")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(f"{path}: not JSON: {error}") from error
        if not isinstance(manifest, dict):
            raise BadInput(f"{path}: expected an object with name and version")
        check_keys(str(path), manifest, ("name", "version"), ("name", "version"))
        return Info(name=check_name(f"{path}: name", manifest["name"]), version=str(manifest["version"]))

    def recorded_steps(self, cell: Cell) -> frozenset[str]:
        """Steps that some rank recorded, `hf` where there is an export, and `close`: to lack it is a failure.

        Empty if no rule reads any and no rank broke off: that all ranks finished is no verdict on a target. Every step
        where a record cannot be read: no rule is unclaimed for that, and running the cell says why.
        """
        if cell.id not in self._steps:
            try:
                self._steps[cell.id] = self._recorded(self.cells[cell.id])
            except BadInput:
                self._steps[cell.id] = frozenset(step for rule in load_rules().values() for step in rule.steps)
        return self._steps[cell.id]

    def _recorded(self, folder: Path) -> frozenset[str]:
        ranks = [RankRecord(0, path) for path in _ranks(folder)]
        steps = {str(event["step"]) for record in ranks for event in record.events}
        if "export" in steps or tensor_files(folder / HF):
            steps.add(HF)
        broke_off = steps and not all(record.has("close") for record in ranks)
        return frozenset({*steps, "close"}) if broke_off or steps & TELLING else frozenset()

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        """A dump runs nothing."""
        raise Unsupported(f"{self.info.name} holds records of {cell.id} and cannot run it")
