"""`init` writes an adapter that runs as it stands, and conforms once its two marked places are filled in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from moeref_conformance import cli
from moeref_conformance.contract.results import read

CELL = "qwen3_moe/tp2/gloo"
#: What an author writes, with moeref as the framework, which gathers every tensor on all ranks.
FILLED = """
import adapter
import torch
import torch.distributed as dist

from moeref import bridge, exporter, families
from moeref.layout import Layout


class Export(adapter.Export):
    def load(self, checkpoint):
        self.table = bridge.ShardMap(families.read(checkpoint, "float32"), Layout.parse("tp=2"), divisible_by=1)
        bridge.load(self.table, dist.get_rank(), self.models, checkpoint)

    def exported(self):
        for tensor, full in exporter.export(exporter.Plan(self.table), dist.get_rank(), self.models):
            full = torch.empty(tensor.shape) if full is None else full.clone()
            dist.broadcast(full, 0)
            yield tensor.name, full


adapter.Export = Export
target = adapter.target
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapter, in which it is run."""
    made = tmp_path_factory.mktemp("project")
    assert cli.main(["init", str(made / "adapter.py")]) == 0
    (made / "filled.py").write_text(FILLED)
    return made


@pytest.mark.ranks
def test_it_runs_and_the_report_says_what_to_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["smoke", "--target", "adapter:target", "--cell", CELL, "--out", "out"]) == 1
    red = [verdict for verdict in read(folder / "out" / "results.jsonl").verdicts if verdict.status == "fail"]
    assert [verdict.rule for verdict in red] == ["RUN-001"]
    assert all("yours: load " in finding.message for finding in red[0].findings)


@pytest.mark.ranks
def test_filled_in_it_conforms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["smoke", "--target", "filled:target", "--cell", CELL, "--out", "filled"]) == 0
    status = {verdict.rule: verdict.status for verdict in read(folder / "filled" / "results.jsonl").verdicts}
    assert [r for r in ("LOD-001", "EXP-001", "EXP-002", "EXP-005", "EXP-011") if status[r] != "pass"] == [], status
    assert set(status.values()) <= {"pass", "unclaimed", "untested"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("here.py", "here.py exists; name a file that does not"),
        ("adapter", "adapter: the adapter is a module; name it like adapter.py"),
        ("my-adapter.py", "the adapter is a module"),
        ("no/adapter.py", "no: no such folder"),
    ],
)
def test_nothing_is_written_over(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("mine")
    assert cli.main(["init", name]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here.py"]
    assert (tmp_path / "here.py").read_text() == "mine"


@pytest.mark.parametrize("where", ["package", "my work", "..", "absolute"])
def test_the_command_it_prints_finds_the_module(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder in which `init` ran: by the name of a package, else after a step into the folder."""
    here = tmp_path / "here"
    folder = tmp_path if where == "absolute" else here / where
    folder.mkdir(parents=True, exist_ok=True)
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    named = folder if where == "absolute" else Path(where)
    assert cli.main(["init", str(named / "adapter.py")]) == 0
    step, _, run = capsys.readouterr().out.splitlines()[1].rpartition(" && ")
    module = run.split("--target ")[1].split(":target ")[0]
    printed = f"{step or 'true'} && test -e {module.replace('.', '/')}.py"
    assert subprocess.run(["bash", "-c", printed], check=False).returncode == 0
