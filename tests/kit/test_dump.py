"""A dump is judged like a run: recorded by a few lines elsewhere, without an adapter, and red when it is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moeref_conformance import cli
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.recorder import Recorder
from moeref_conformance.contract.results import read
from moeref_conformance.resolve import resolve
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
CELL = "qwen3_moe/tp2/gloo"
FOLDER = CELL.replace("/", "__")


def test_a_second_record_in_the_same_place_is_refused_in_one_sentence(tmp_path: Path) -> None:
    Recorder(tmp_path, CELL, 1)
    told = (
        f"^{tmp_path / FOLDER / 'rank0001'}: there is a record already; delete it, or name another folder for this run$"
    )
    with pytest.raises(FileExistsError, match=told):
        Recorder(tmp_path, CELL, 1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of moeref on two ranks, each a plain Python process: no kit world, no adapter, no probe."""
    folder = tmp_path_factory.mktemp("recorded")
    assert cli.main(["inputs", "--cell", CELL, "--out", str(folder / "inputs")]) == 0
    (made,) = (folder / "inputs").iterdir()
    env = {**os.environ, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("recorded_run.py"))
    ranks = [
        subprocess.Popen([sys.executable, script, str(made), str(folder / "dump"), CELL], env={**env, "RANK": str(r)})
        for r in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    (folder / "dump" / "manifest.json").write_text('{"name": "a run", "version": "7"}')
    return folder / "dump"


def judge(dump: Path, out: Path) -> tuple[int, dict[str, str], str]:
    code = cli.main(["run", "--target", f"dump:{dump}", "--cell", CELL, "--out", str(out)])
    verdicts = read(out / "results.jsonl").verdicts
    said = " ".join(f"{f.message} {f.diagnosis}" for v in verdicts for f in v.findings)
    return code, {v.rule: v.status for v in verdicts}, said


def test_a_good_record_is_judged_without_an_adapter(recorded: Path, tmp_path: Path) -> None:
    code, status, _ = judge(recorded, tmp_path / "out")
    assert code == 0
    passed = {rule for rule, s in status.items() if s == "pass"}
    exports = {f"EXP-{number}" for number in ("001", "002", "003", "005", "009", "011")}
    assert passed == {"RUN-001", "LOD-001", "LOD-005", "FWD-001", *exports}
    assert {s for rule, s in status.items() if rule not in passed} == {"unclaimed", "untested"}
    # There is no one-rank record.
    assert {rule for rule, s in status.items() if s == "untested"} == {"EXP-007", "EXP-010", "FWD-002"}
    target = read(tmp_path / "out" / "results.jsonl").header["target"]
    assert target["version"] == "7"
    assert target["claims"]["families"] == ["qwen3_moe"]


def _copy(recorded: Path, to: Path) -> Path:
    for path in recorded.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(recorded)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


def test_wrong_bytes_are_red_with_their_cause(recorded: Path, tmp_path: Path) -> None:
    dump = _copy(recorded, tmp_path / "dump")
    file = dump / FOLDER / "rank0000" / "export.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.mlp.experts.{}.up_proj.weight"
    a, b = name.format(4), name.format(9)
    tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, file)
    code, status, said = judge(dump, tmp_path / "out")
    assert (code, status["EXP-002"]) == (1, "fail")
    assert "holds expert 9" in said


def test_a_record_that_broke_off_is_no_pass(recorded: Path, tmp_path: Path) -> None:
    dump = _copy(recorded, tmp_path / "dump")
    events = dump / FOLDER / "rank0001" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))
    code, status, said = judge(dump, tmp_path / "out")
    assert (code, status["RUN-001"]) == (1, "fail")
    assert "rank 1 (tp1" in said


def test_a_missing_rank_is_named(recorded: Path, tmp_path: Path) -> None:
    dump = _copy(recorded, tmp_path / "dump")
    for path in (dump / FOLDER / "rank0001").iterdir():
        path.unlink()
    (dump / FOLDER / "rank0001").rmdir()
    code, status, said = judge(dump, tmp_path / "out")
    assert (code, status["RUN-001"]) == (1, "fail")
    assert "rank 1 (tp1" in said


def test_an_exported_folder_alone(recorded: Path, tmp_path: Path) -> None:
    hf = tmp_path / "dump" / FOLDER / "hf"
    hf.mkdir(parents=True)
    tensors = load_file(recorded / FOLDER / "rank0000" / "export.safetensors")
    save_file(tensors, hf / "model.safetensors")
    code, status, _ = judge(tmp_path / "dump", tmp_path / "out")
    assert code == 0
    assert {rule for rule, s in status.items() if s == "pass"} == {
        "RUN-001",
        "EXP-001",
        "EXP-002",
        "EXP-003",
        "EXP-011",
    }
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    del tensors["lm_head.weight"]
    save_file(tensors, hf / "model.safetensors")
    code, status, said = judge(tmp_path / "dump", tmp_path / "out2")
    assert (code, status["EXP-001"], status["EXP-003"]) == (1, "fail", "fail")
    assert "lm_head.weight was never sent" in said
    (hf / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-9])
    code, _, said = judge(tmp_path / "dump", tmp_path / "out3")
    assert code == 1
    assert "not a whole safetensors file" in said


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: None, "no such folder"),
        (lambda d: d.mkdir(), "no folder of a cell"),
        (lambda d: (d / FOLDER).mkdir(parents=True), "has neither hf/ nor rank0000"),
        (lambda d: ((d / FOLDER / "hf").mkdir(parents=True), (d / "manifest.json").write_text("{")), "not JSON"),
        (lambda d: ((d / FOLDER / "hf").mkdir(parents=True), (d / "manifest.json").write_text("{}")), "name"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path: Path, make: object, says: str) -> None:
    make(tmp_path / "dump")  # type: ignore[operator]
    with pytest.raises(BadInput, match=says):
        resolve(f"dump:{tmp_path / 'dump'}")


ESCAPE = """
[[known]]
rule = ["EXP-001", "EXP-002", "EXP-003"]
where = { family = "qwen3_moe" }
outcome = "fail"
pattern = "[a-z]"
reason = "so says the author"
link = "https://example.org/1"
expires = 9999-01-01
"""


@pytest.mark.parametrize("name", ["../../mine", "/{0}/mine", "a/b", "..", "", "\x1b[2J", 7, None, "a\\b"])
def test_a_name_in_the_manifest_leads_nowhere(tmp_path: Path, name: object) -> None:
    (tmp_path / "mine.toml").write_text(ESCAPE)
    (tmp_path / "dump" / FOLDER / "hf").mkdir(parents=True)
    name = name.format(tmp_path) if isinstance(name, str) else name
    (tmp_path / "dump" / "manifest.json").write_text(json.dumps({"name": name, "version": "1"}))
    with pytest.raises(BadInput, match="is not a name"):
        resolve(f"dump:{tmp_path / 'dump'}")


@pytest.mark.parametrize("manifest", [b"7", b"[]", b"\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, manifest: bytes) -> None:
    (tmp_path / FOLDER / "hf").mkdir(parents=True)
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(BadInput, match=r"manifest\.json"):
        resolve(f"dump:{tmp_path}")


def _link(path: Path) -> None:
    kept = path.with_name(f"kept-{path.name}")
    path.rename(kept)
    path.symlink_to(kept)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _rank(dump: Path, *events: dict[str, object], rank: int = 0) -> Path:
    folder = dump / FOLDER / f"rank{rank:04d}"
    folder.mkdir(parents=True)
    lines = [json.dumps({"phase": "ok", "at": 0.0, "seconds": 0.0, "value": None} | event) for event in events]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("spoil", "at"),
    [
        *((_link, place) for place in ("manifest.json", FOLDER, f"{FOLDER}/rank0000", f"{FOLDER}/hf")),
        *((_link, f"{FOLDER}/{file}") for file in ("rank0000/events.jsonl", "rank0000/export.safetensors")),
        (_link, f"{FOLDER}/hf/model.safetensors"),
        (_fifo, "manifest.json"),
        (_fifo, f"{FOLDER}/rank0000/events.jsonl"),
        (_fifo, f"{FOLDER}/hf/model.safetensors"),
    ],
)
def test_only_regular_files_are_read(tmp_path: Path, spoil: Callable[[Path], None], at: str) -> None:
    folder = _rank(tmp_path, {"step": "close"})
    (folder / "export.safetensors").touch()
    (tmp_path / FOLDER / "hf").mkdir()
    (tmp_path / FOLDER / "hf" / "model.safetensors").touch()
    (tmp_path / "manifest.json").write_text('{"name": "a run", "version": "7"}')
    (folder / "scratch").symlink_to(tmp_path)  # the target's own: it is not read
    assert resolve(f"dump:{tmp_path}").info.name == "a run"
    spoil(tmp_path / at)
    with pytest.raises(BadInput, match="is not a"):
        resolve(f"dump:{tmp_path}")


@pytest.mark.parametrize(
    "events",
    [
        (),
        ({"step": "close"},),
        ({"step": "open"}, {"step": "close"}),
        ({"step": "mine"}, {"step": "close"}),
    ],
)
def test_a_record_that_no_rule_reads_is_no_verdict(tmp_path: Path, events: tuple[dict[str, object], ...]) -> None:
    for rank in range(2):
        _rank(tmp_path / "dump", *events, rank=rank)
    code, status, said = judge(tmp_path / "dump", tmp_path / "out")
    assert (code, set(status.values()), said) == (3, {"unclaimed"}, "")


def test_an_export_without_files_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "dump" / FOLDER / "hf").mkdir(parents=True)
    code, status, _ = judge(tmp_path / "dump", tmp_path / "out")
    assert (code, set(status.values())) == (3, {"unclaimed"})


def test_a_record_that_broke_off_before_anything_is_judged_is_red(tmp_path: Path) -> None:
    _rank(tmp_path / "dump", {"step": "open"}, {"step": "close"})
    _rank(tmp_path / "dump", {"step": "open", "phase": "begin"}, rank=1)
    code, status, _ = judge(tmp_path / "dump", tmp_path / "out")
    assert (code, status["RUN-001"]) == (1, "fail")


def test_a_dump_without_records_is_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dump").mkdir()
    run = ["run", "--target", f"dump:{tmp_path / 'dump'}", "--cell", CELL, "--out", str(tmp_path / "out")]
    assert cli.main(run) == 3
    assert "no folder of a cell" in capsys.readouterr().err


def test_kept_records_of_a_run_are_a_dump(tmp_path: Path) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out"
    one = ["--cell", "qwen3_moe/one/gloo"]
    assert (
        cli.main(["run", "--target", "moeref", "--matrix", "smoke", *one, "--keep", str(kept), "--out", str(out)]) == 0
    )
    again = ["run", "--target", f"dump:{kept}", "--matrix", "smoke", *one, "--out", str(tmp_path / "again")]
    assert cli.main(again) == 0
    before, after = (
        {v.rule: (v.status, v.met) for v in read(folder / "results.jsonl").verdicts}
        for folder in (out, tmp_path / "again")
    )
    for rule in ("RUN-002", "RUN-003"):  # collectives and inputs were checked in the run, and are not in its record
        del before[rule], after[rule]
    assert json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def test_a_dump_claims_the_families_of_its_cells(tmp_path: Path) -> None:
    for name in ("glm4_moe+tied__tp2__gloo", "qwen3-30b-a3b__tp2__gloo", "glm4_moe__pp2__gloo"):
        (tmp_path / name / "hf").mkdir(parents=True)
    assert resolve(f"dump:{tmp_path}").claims.families == {"glm4_moe", "qwen3_moe"}
