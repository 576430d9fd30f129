"""How many cells a minute the kit judges, next to the usual way: a Python process a rank, each importing everything.

Both run the same probe on the same cells, one after the other in one run; the printed figures are this machine's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from moeref_conformance.contract.api import Cell, to_plain
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.plan import matrix
from moeref_conformance.resolve import resolve
from moeref_conformance.worlds.forked import ForkedWorld
from rich.console import Console
from rich.table import Table

pytestmark = pytest.mark.bench
CELLS = ("one", "tp2", "pp2-vpp2", "tp2-ep2", "tp2-pp2-vpp2-ep2-etp2")


def _spawned(cell: Cell, folder: Path, inputs: dict[str, str]) -> float:
    folder.mkdir()
    request = folder / "request.json"
    request.write_text(
        json.dumps({"cell": to_plain(cell), "inputs": inputs, "folder": str(folder), "target": "moeref"})
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("spawned_rank.py")), str(request)]
    began = time.monotonic()
    ranks = [
        subprocess.Popen([*command, str(r)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for r in range(cell.layout.world)
    ]
    assert [rank.wait() for rank in ranks] == [0] * len(ranks)
    return time.monotonic() - began


def test_cells_per_minute(tmp_path: Path) -> None:
    cells = [c for c in matrix.load("cpu").cells if c.id in {f"qwen3_moe/{name}/gloo" for name in CELLS}]
    assert len(cells) == len(CELLS)
    claims = resolve("moeref").claims
    table = Table("cell", "ranks", "forked, s", "process a rank, s", "ratio", title="seconds a cell, moeref on gloo")
    forked, spawned = 0.0, 0.0
    with ForkedWorld("moeref") as world:
        began = time.monotonic()
        world.start()
        start = time.monotonic() - began
        for i, cell in enumerate(cells):
            inputs = expected(cell, tmp_path).inputs
            (tmp_path / f"forked{i}").mkdir()
            outcome = world.run(cell, tmp_path / f"forked{i}", inputs, claims)
            assert outcome.ok, outcome
            usual = _spawned(cell, tmp_path / f"spawned{i}", inputs)
            forked, spawned = forked + outcome.seconds, spawned + usual
            row = (f"{outcome.seconds:.2f}", f"{usual:.2f}", f"{usual / outcome.seconds:.1f}")
            table.add_row(cell.id, str(cell.layout.world), *row)
    table.add_section()
    table.add_row("all", "", f"{forked:.1f}", f"{spawned:.1f}", f"{spawned / forked:.1f}")
    table.add_row("cells a minute", "", f"{60 * len(cells) / forked:.0f}", f"{60 * len(cells) / spawned:.0f}", "")
    Console(width=100).print(table, f"imports of the one preloaded process: {start:.1f} s, once a run")
    assert forked < spawned
