"""The world of a dump: nothing runs; recorded folders are copied to where judges read records."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Claims
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.records import RankRecord, event, free_key, rank_dir, write_events
from moeref_conformance.contract.topology import coords_text
from moeref_conformance.targets.dump import HF, DumpTarget, record_files, tensor_files
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


class DumpWorld:
    """Serves the cells of one dump."""

    def __init__(self, target: DumpTarget) -> None:
        self._target = target

    def run(self, cell: Cell, cell_dir: Path, inputs: Mapping[str, str], claims: Claims) -> RunOutcome:
        """Copy the records of every rank. A rank without one, or whose record was not closed, did not finish."""
        began, folder = time.monotonic(), self._target.cells[cell.id]
        if tensor_files(folder / HF):
            return RunOutcome(_exported(folder / HF, cell, cell_dir), time.monotonic() - began)
        exits = []
        for rank in range(cell.layout.world):
            rank_dir(cell_dir, rank).mkdir(parents=True, exist_ok=True)
            for file in record_files(rank_dir(folder, rank)):
                shutil.copyfile(file, rank_dir(cell_dir, rank) / file.name)
            record = RankRecord(rank, rank_dir(folder, rank))
            whole = record.has("close")
            place = coords_text(cell.layout, rank)
            exits.append(RankExit(rank, last_step=record.last_step, coords=place, first=not whole, finished=whole))
        return RunOutcome(tuple(exits), time.monotonic() - began)


def _exported(folder: Path, cell: Cell, cell_dir: Path) -> tuple[RankExit, ...]:
    """A Hugging Face folder as the export record of rank 0. The other ranks have empty records."""
    where = rank_dir(cell_dir, 0)
    where.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Any] = {}
    error: dict[str, str] | None = None
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a safe_open handle is not a mapping)
                    tensor = file.get_tensor(name)
                    tensors[free_key(tensors, name)] = tensor
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    row = {"name": name, "shape": list(tensor.shape), "dtype": dtype, "materialised": True, "alive": 0}
                    rows.append(row)
        except (SafetensorError, OSError) as broken:
            message = f"{path.name} is not a whole safetensors file: {broken}"
            error = {"type": type(broken).__name__, "message": message, "traceback": message}
            break
    if tensors:
        save_file(tensors, where / "export.safetensors")
    sent, closed = event("export", "ok", value=rows), event("close", "ok", value=False)
    ranks = range(cell.layout.world)
    first = [event("export", "raised", error=error)] if error else [sent, closed]
    write_events(cell_dir, {rank: [closed] if rank else first for rank in ranks})
    places = [coords_text(cell.layout, rank) for rank in ranks]
    return tuple(
        RankExit(rank, last_step="close", coords=places[rank], finished=bool(rank or not error)) for rank in ranks
    )
