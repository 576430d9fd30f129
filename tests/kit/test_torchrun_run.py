"""`torchrun … -m moeref_conformance run`: as users of several machines call it, here on one and without a GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from moeref_conformance.contract.results import Results, read
from moeref_conformance.contract.rules import load_rules

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
MATRIX = """
schema = 1
name = "coordinator"
[layouts]
one = { layers = 2 }
tp2 = { tp = 2, layers = 2 }
pp2 = { pp = 2, layers = 2 }
tp4 = { tp = 4, layers = 2 }
[[grid]]
backend = ["gloo"]
family = ["qwen3_moe"]
layout = ["one", "tp2", "tp4"]
[[grid]]
backend = ["static"]
family = ["qwen3_moe"]
layout = ["tp4"]
[[grid]]
backend = ["gloo"]
family = ["qwen3_moe"]
layout = ["pp2"]
tags = ["dies-in-export"]
"""
TP2, TP4, PP2 = (f"qwen3_moe+L2/{layout}/gloo" for layout in ("tp2", "tp4", "pp2"))
TORCHRUN = ["-m", "torch.distributed.run"]


def start(before: list[str], folder: Path, *more: str, target: str) -> subprocess.Popen[str]:
    """`run` in world gloo; `folder` has the matrix and gets the results and the temporary files."""
    (folder / "temporary").mkdir(parents=True)
    (folder / "coordinator.toml").write_text(MATRIX)
    command = [sys.executable, *before, "-m", "moeref_conformance", "run", "--target", target, "--backend", "gloo"]
    command += ["--matrix", str(folder / "coordinator.toml"), "--out", str(folder / "out"), *more]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "GROUP_"))}
    return subprocess.Popen(
        command,
        env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = running.communicate(timeout=540)
    finally:
        running.kill()
    return running.returncode, out, err


def key(results: Results, *without: str) -> list[Any]:
    return [
        (v.cell, v.rule, v.status, v.met, [(f.stage, f.rank, f.coords) for f in v.findings])
        for v in results.verdicts
        if v.cell not in without
    ]


def test_cells_are_judged_as_without_torchrun(tmp_path: Path) -> None:
    target = "moeref_conformance.selftest.misbehaving:target"
    cells = ["--cell", "*/one/*", "--cell", TP2, "--cell", PP2, "--cell", "*/static"]
    alone, _, _ = finish(start([], tmp_path / "alone", *cells, target=target))
    several = start([*TORCHRUN, "--nproc-per-node", "2"], tmp_path / "several", target=target)
    code, out, err = finish(several)
    assert alone == 1
    assert code == 1, err  # torchrun's own; rank 0's is in the text
    assert "exitcode  : 1" in err
    expected, found = (read(tmp_path / run / "out" / "results.jsonl") for run in ("alone", "several"))
    assert len(key(expected)) > 100
    assert key(found, TP4) == key(expected)
    passed = [v for v in found.verdicts if (v.cell, v.status) == (TP2, "pass")]
    assert {v.rule for v in passed} > {"RUN-001", "EXP-007", "FWD-001", "GRD-001"}
    assert any("≤" in v.met for v in passed)
    (died,) = [v for v in found.verdicts if (v.cell, v.rule) == (PP2, "RUN-001")]
    assert died.status == "fail"
    assert "rank 1 (tp0 pp1 ep0 etp0 dp0) died in step export: SIGKILL" in died.findings[0].message
    wide = [v for v in found.verdicts if v.cell == TP4]
    assert {(v.status, v.reason) for v in wide} == {("untested", "has 4 ranks, and torchrun started 2")}
    assert out.count("report:") == 1
    assert list((tmp_path / "several" / "temporary").glob("moeref-conformance-*")) == []


def test_two_machines_that_share_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        meet = f"localhost:{server.getsockname()[1]}"
    before = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", meet]
    nodes = [
        start(before, tmp_path / name, "--cell", TP2, "--rule", "EXP", "--keep", str(tmp_path / name), target="moeref")
        for name in ("a", "b")
    ]
    ended = [finish(node) for node in nodes]
    # Which of them becomes rank 0 is torchrun's choice.
    (here,) = [tmp_path / name for name in ("a", "b") if (tmp_path / name / "out").exists()]
    results = read(here / "out" / "results.jsonl")
    judged = {v.rule: v.status for v in results.verdicts if v.rule.startswith("EXP")}
    assert judged == dict.fromkeys((rule for rule in load_rules() if rule.startswith("EXP")), "pass"), ended
    assert [code for code, _, _ in ended] == [0, 0]
    (cell,) = here.glob("*tp2*")
    assert all((cell / rank / "shards.safetensors").stat().st_size for rank in ("rank0000", "rank0001"))
    for name in ("a", "b"):
        assert list((tmp_path / name / "temporary").glob("moeref-conformance-*")) == []
