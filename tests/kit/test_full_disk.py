"""A full disk is the machine's, and not the target's."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from kit_toy import ToyWorld, run
from moeref_conformance import cli
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import EVENTS
from moeref_conformance.judges import Case
from moeref_conformance.report import write_all

pytestmark = pytest.mark.cpu
TP2 = "qwen3_moe/tp2/gloo"


def full(cell: Any, cell_dir: Path, how: str) -> RunOutcome:
    """The outcome of two ranks, of which the second could not write."""
    told = os.strerror(errno.ENOSPC)
    if how == "recorded":
        error = {"type": "SafetensorError", "message": f"I/O error: {told} (os error 28)", "traceback": ""}
        (cell_dir / "rank0001").mkdir()
        line = json.dumps({"step": "export", "phase": "raised", "at": 1.0, "error": error})
        (cell_dir / "rank0001" / EVENTS).write_text(line + "\n")
    tail = f"OSError: [Errno 28] {told}\n" if how == "printed" else ""
    exits = RankExit(0, finished=True), RankExit(1, 3, last_step="export", first=True, stderr_tail=tail)
    return RunOutcome(exits, 0.1)


def blames(case: Case) -> Outcome:
    """Every crash is a finding."""
    crashes = case.observation.crashes if case.observation else []
    return Outcome(findings=tuple(Finding(stage=crash.step, message=crash.detail) for crash in crashes))


@pytest.mark.parametrize("how", ["recorded", "printed", "untold"])
def test_a_full_disk_is_the_machine_s(tmp_path, how, monkeypatch):
    class Full(ToyWorld):
        def run(self, cell, cell_dir, inputs, claims):
            return full(cell, cell_dir, how) if cell.id == TP2 else super().run(cell, cell_dir, inputs, claims)

    if how == "untold":  # nothing could be written, not even why
        real = os.statvfs(tmp_path)
        free = os.statvfs_result((*tuple(real)[:3], 0, 0, *tuple(real)[5:]))
        monkeypatch.setattr(os, "statvfs", lambda path: free)
    results = run(tmp_path, Full(), RUN_001=blames)
    verdict = results.table[TP2]["RUN-001"]
    assert verdict.status == "error"
    assert "a disk is full, so the cell says nothing about the target" in verdict.reason
    assert "TMPDIR" in verdict.reason
    assert results.exit_code == 2


def test_a_disk_that_is_full_for_results_is_named(tmp_path, capsys, monkeypatch):
    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    results = str(write_all(run(tmp_path), tmp_path / "out").parent / "results.jsonl")
    monkeypatch.setattr("moeref_conformance.report.write_all", no_space)
    assert cli.main(["report", results]) == 2
    said = capsys.readouterr().err
    assert "No space left on device: free some, or name other folders" in said
    assert "Traceback" not in said
