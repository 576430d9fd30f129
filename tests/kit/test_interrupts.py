"""A run that is asked to stop reports at once and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit_toy
import pytest
from kit_toy import ToyWorld, make_plan
from moeref_conformance.contract.results import Results, read
from moeref_conformance.worlds import interrupts, torchrun

pytestmark = pytest.mark.cpu
TP2 = "qwen3_moe/tp2/gloo"


@pytest.mark.parametrize("number", interrupts.STOPS)
def test_signals_that_ask_to_stop_interrupt_once(number, monkeypatch):
    monkeypatch.setattr(interrupts, "_leave_terminal", lambda: None)
    before = signal.signal(number, signal.default_int_handler)  # whoever runs the tests may have it ignored
    try:
        with interrupts.raised() as received:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            os.kill(os.getpid(), number)
        assert received == [number]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_signal_that_comes_while_an_object_is_finalised_interrupts_too():
    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interrupts.raised() as received:
            Finalised()
            with pytest.raises(KeyboardInterrupt):
                time.sleep(5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_what_the_interrupted_frames_held_ends_with_them():
    class Held:
        pass

    seen = []

    def interrupted() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interrupts.raised():
            with suppress(KeyboardInterrupt):
                interrupted()
            assert seen[0]() is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.raised() as received:
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == []


def test_under_torchrun_signals_of_rank_0_reach_whoever_called(monkeypatch):
    gathered = SimpleNamespace(gather=lambda *_: nullcontext(SimpleNamespace(gone={})))
    monkeypatch.setattr(torchrun, "Coordinator", gathered)
    monkeypatch.setattr(torchrun.Place, "here", lambda: torchrun.Place(0, 1, 0, 0, "here"))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interrupts.raised() as received, pytest.raises(KeyboardInterrupt):
            torchrun.take_part("a target", lambda coordinator: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def awaited(condition: Callable[[], Any], seconds: float) -> float:
    """The seconds it took; fails after so many."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.05)
    return time.monotonic() - begin


@pytest.mark.ranks
def test_an_interrupted_run_reports_at_once_and_leaves_nothing(tmp_path):
    (tmp_path / "toy.toml").write_text(kit_toy.MATRIX)
    for name in ("pids", "temporary"):
        (tmp_path / name).mkdir()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "temporary"),
        "TOY_PIDS": str(tmp_path / "pids"),
    }  # fmt: skip
    command = [sys.executable, "-m", "moeref_conformance", "run", "--target", "toy_daemon:target"]
    command += ["--matrix", str(tmp_path / "toy.toml"), "--cell", "*/one/*", "--cell", TP2, "--jobs", "1"]
    files = [tmp_path / "pids" / f"rank{rank}" for rank in range(2)]
    with (tmp_path / "err").open("w") as err:
        running = subprocess.Popen(
            [*command, "--out", str(tmp_path / "out")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=err,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
        )
    try:
        awaited(lambda: all(file.exists() and file.read_text() for file in files), 300)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(alive(pid) for pid in pids)
        running.send_signal(signal.SIGINT)
        awaited(lambda: "interrupted, 1 of 2 cells, report written: " in (tmp_path / "err").read_text(), 20)
        assert running.wait(15) == 3
    finally:
        running.kill()
        running.wait()
    awaited(lambda: not any(alive(pid) for pid in pids), 1)
    assert list((tmp_path / "temporary").glob("moeref*")) == []  # torch keeps a folder of its own
    results = read(tmp_path / "out" / "results.jsonl")
    assert (results.complete, set(results.seconds)) == (False, {"qwen3_moe/one/gloo"})
    assert "The run did not finish" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_that_is_stopped_while_it_prepares_says_so(tmp_path):
    command = [
        sys.executable,
        "-m",
        "moeref_conformance",
        "smoke",
        "--target",
        "moeref",
        "--out",
        str(tmp_path / "out"),
    ]
    running = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stderr is not None
    try:
        assert "importing megatron-core" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert (running.wait(30), said) == (
            3,
            "moeref-conformance: interrupted, before the first cell, no report written\n",
        )
    finally:
        running.kill()
        running.wait()
    assert not (tmp_path / "out").exists()


def test_what_was_judged_is_told_before_worlds_end(tmp_path):
    seen: list[str] = []

    class Slow(ToyWorld):
        def __exit__(self, *_: object) -> None:
            seen.append("worlds ended")

    def progress(event, cell, verdicts):
        if event == "end":
            raise KeyboardInterrupt

    def interrupted(results: Results) -> None:
        seen.append(f"{len(results.seconds)} told")

    plan, parts = make_plan(tmp_path), kit_toy.machinery(Slow())
    kit_toy.runner.run(plan, tmp_path / "out", progress, parts, interrupted)
    assert seen == ["1 told", "worlds ended"]
