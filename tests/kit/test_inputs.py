"""The inputs of a cell: copies of its own, read-only, and what became of them afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit_toy import ToyWorld, machinery, make_plan, run
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.judges import JUDGES
from moeref_conformance.run.runner import Runner
from moeref_conformance.worlds.inputs import Copies, fingerprint, given


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "variant" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "variant" / "tokens").write_bytes(b"tokens")
    (tmp_path / "variant" / "answers").write_bytes(b"42")
    os.utime(folder, (0, 0))  # a write at once gives it another time
    return {"checkpoint": str(folder), "tokens": str(folder.with_name("tokens"))}


def test_copies_lie_apart_and_are_read_only(inputs: dict[str, str]) -> None:
    with given(inputs) as own:
        assert Path(own.paths["tokens"]).read_bytes() == b"tokens"
        assert {path.name for path in own.folder.iterdir()} == {"checkpoint", "tokens"}
        assert not any(path.stat().st_mode & 0o222 for path in own.folder.rglob("*"))
        assert own.written() == ()
    assert not own.folder.exists()
    assert Path(inputs["tokens"]).stat().st_mode & 0o200


def _rewritten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.chmod(0o600)
    file.write_bytes(b"WEIGHTS")


def _rewritten_with_its_old_time(folder: Path) -> None:
    before = (folder / "model.safetensors").stat()
    _rewritten(folder)
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / "model.safetensors").chmod(0o444)


def _replaced(folder: Path) -> None:
    (folder / "new").write_bytes(b"{}")
    (folder / "new").rename(folder / "config.json")


def _linked(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_rewritten, ("checkpoint/model.safetensors was changed",)),
        (_rewritten_with_its_old_time, ("checkpoint/model.safetensors was changed",)),
        (_replaced, ("checkpoint/config.json was replaced",)),
        (_linked, ("checkpoint/config.json was replaced",)),
        (lambda folder: (folder / "config.json").unlink(), ("checkpoint/config.json was removed",)),
        (lambda folder: (folder / "cache").write_text(""), ("checkpoint/cache was added",)),
        (lambda folder: os.mkfifo(folder / "fifo"), ("checkpoint/fifo was added",)),
        (lambda folder: (folder / "../answers").write_text(""), ("answers was added",)),
        (lambda folder: ((folder / "lock").write_text(""), (folder / "lock").unlink()), ("checkpoint was changed",)),
        (lambda folder: (folder / "config.json").chmod(0o600), ("checkpoint/config.json was changed",)),
    ],
)
def test_what_a_target_writes_is_told(
    inputs: dict[str, str], write: Callable[[Path], Any], said: tuple[str, ...]
) -> None:
    with given(inputs) as own:
        folder = Path(own.paths["checkpoint"])
        folder.chmod(0o755)
        write(folder)
        folder.chmod(0o555)
        assert own.written() == said
    assert not own.folder.exists()


def test_fingerprints_are_of_contents(inputs: dict[str, str], tmp_path: Path) -> None:
    with given(inputs) as own:
        assert fingerprint(own.paths) == fingerprint(inputs)
    Path(inputs["tokens"]).write_bytes(b"others")
    assert fingerprint(own.paths) != fingerprint(inputs)


def test_a_copy_serves_the_next_cell_unless_it_was_written_to(inputs: dict[str, str]) -> None:
    seen: list[Path] = []

    def run(paths: dict[str, str], write: bool = False) -> RunOutcome:
        seen.append(Path(paths["checkpoint"]))
        assert sorted(path.name for path in seen[-1].iterdir()) == ["config.json", "model.safetensors"]
        if write:
            _rewritten(seen[-1])
        return RunOutcome((), 0.0, written=("by another rank",))

    with Copies(most=1) as copies:
        assert copies.run(inputs, run).written == ("by another rank",)
        copies.run(inputs, run)
        assert seen[0] == seen[1]
        told = copies.run(inputs, lambda paths: run(paths, write=True)).written
        assert told == ("checkpoint/model.safetensors was changed", "by another rank")
        assert not seen[2].exists()
        copies.run(inputs, run)
        assert seen[3] != seen[2]
        assert (seen[3] / "model.safetensors").read_bytes() == b"weights"
        copies.run({**inputs, "hf_config": inputs["checkpoint"] + "/config.json"}, run)
        assert [path.exists() for path in seen[3:]] == [False, True]
        with pytest.raises(RuntimeError, match="the world broke"):
            copies.run(inputs, _breaks)
    assert not any(path.exists() for path in seen)


def _breaks(paths: dict[str, str]) -> RunOutcome:
    raise RuntimeError("the world broke")


class Writing(ToyWorld):
    """Its ranks add a file to their config's folder in cells of two ranks."""

    def run(self, cell: Any, cell_dir: Path, inputs: Any, claims: Any) -> Any:
        self.places = [cell_dir, Path(inputs["hf_config"])]
        if cell.layout.tp == 2:
            Path(inputs["hf_config"]).chmod(0o755)
            (Path(inputs["hf_config"]) / "cache").touch()
        return super().run(cell, cell_dir, inputs, claims)


def test_a_cell_that_writes_to_its_inputs_fails_and_no_other(tmp_path: Path) -> None:
    results = run(tmp_path, Writing(), RUN_003=JUDGES["RUN-003"])
    status = {cell: rows["RUN-003"].status for cell, rows in results.table.items()}
    assert status == {
        "qwen3_moe/one/gloo": "pass",
        "qwen3_moe/tp2/gloo": "fail",
        "qwen3_moe/pp2-vpp2/gloo": "pass",
        "glm4_moe/tp2/gloo": "unclaimed",
    }
    (finding,) = results.table["qwen3_moe/tp2/gloo"]["RUN-003"].findings
    assert finding.message.endswith("/cache was added")


def test_what_is_expected_lies_in_no_folder_above_those_of_ranks(tmp_path: Path) -> None:
    world, made = Writing(), list[Path]()
    toy = machinery(world)
    parts = replace(toy, expect=lambda cell, folder: (made.append(folder), toy.expect(cell, folder))[1])
    plan = make_plan(tmp_path)
    with Runner.opened(plan, parts) as runner:
        runner.cell(plan.cells[0])
    tops = {place.relative_to(made[0].parent).parts[0] for place in world.places}
    assert made[0].name not in tops
    assert len(tops) == 1  # records and copies of inputs both go with the run
