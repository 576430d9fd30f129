"""Cells over processes of torchrun: judged as without it, every failure named with rank and machine, nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_coordinator
from moeref_conformance.contract.api import Layout
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.topology import coords_text
from moeref_conformance.worlds.coordinator import Coordinator
from moeref_conformance.worlds.forked import WorldError
from moeref_conformance.worlds.messages import connection_over, pack, unpack
from moeref_conformance.worlds.torchrun import TorchrunWorld, merge
from moeref_conformance.worlds.worker import Place
from toy_coordinator import cell
from toy_targets import Toy

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
HOST = socket.gethostname()
KIT = Path(toy_coordinator.__file__).parent


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def environment(rank: int, nodes: list[int], port: int, **more: str) -> dict[str, str]:
    """What torchrun would set for rank `rank` of a coordinator whose ranks are on these machines."""
    node = nodes[rank]
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "GROUP_RANK": str(node),
        "LOCAL_RANK": str(nodes[:rank].count(node)),
        **more,
    }


def process(rank: int, nodes: list[int], port: int, **more: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([more.pop("FIRST", ""), str(KIT), *sys.path]).strip(os.pathsep)
    return subprocess.Popen(
        [sys.executable, str(KIT / "toy_coordinator.py")],
        env={**os.environ, **environment(rank, nodes, port, **more), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def gathered(nodes: list[int], **more: str) -> Iterator[tuple[Coordinator, list[subprocess.Popen[str]]]]:
    """This process is that of rank 0, without torchrun: the others are started here."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment(0, nodes, port).items():
            patch.setenv(key, value)
        others = [process(rank, nodes, port, **more) for rank in range(1, len(nodes))]
        try:
            with Coordinator.gather(Place.here(), toy_coordinator.SPEC, toy_coordinator.ENTRY) as coordinator:
                yield coordinator, others
        finally:
            for other in others:
                try:
                    other.wait(60)
                finally:
                    other.kill()


@pytest.fixture(scope="module")
def world() -> Iterator[TorchrunWorld]:
    """Ranks 0 and 1 on one machine, rank 2 on another of the same name."""
    with (
        gathered([0, 0, 1]) as (coordinator, others),
        TorchrunWorld(coordinator, "gloo", deadline=20, grace=2) as found,
    ):
        found.start()
        yield found
        found.__exit__(None, None, None)
        coordinator.close()
        assert [other.wait(60) for other in others] == [0, 0]
        assert [other.communicate() for other in others] == [("", "")] * 2


@pytest.fixture
def config(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "data.txt").write_text("a tiny model")
    return {"hf_config": str(folder)}


def run(world: TorchrunWorld, folder: Path, entry: str, ranks: int, inputs: dict[str, str]) -> RunOutcome:
    outcome = world.run(cell(entry, ranks), folder, inputs, Toy.claims)
    assert outcome.error == ""
    assert [e.rank for e in outcome.exits] == list(range(ranks))
    return outcome


def first(outcome: RunOutcome) -> RankExit:
    (found,) = [e for e in outcome.exits if e.first]
    return found


def processes(*texts: str) -> list[int]:
    """Processes whose command line has all of these."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(entry.name)] if all(text in command for text in texts) else []
    return found


def gone(pids: list[int], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def record(folder: Path, rank: int, name: str) -> Any:
    return json.loads((folder / f"rank{rank:04d}" / name).read_text())


def test_ranks_finish(world: TorchrunWorld, tmp_path: Path, config: dict[str, str]) -> None:
    outcome = run(world, tmp_path / "cell", "trivial", 3, config)
    assert outcome.ok
    seen = [record(tmp_path / "cell", rank, "seen.json") for rank in range(3)]
    assert [s["sum"] for s in seen] == [3.0] * 3
    assert [s["local"] for s in seen] == [["0", "2"], ["1", "2"], ["0", "1"]]
    assert [e.host for e in outcome.exits] == [f"{HOST}#0", f"{HOST}#0", f"{HOST}#1"]
    assert outcome.exits[2].text == f"rank 2 (tp0 pp0 ep0 etp0 dp2 on {HOST}#1) finished"


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_than_processes(world: TorchrunWorld, tmp_path: Path, config: dict[str, str], ranks: int) -> None:
    assert run(world, tmp_path / "cell", "trivial", ranks, config).ok
    assert record(tmp_path / "cell", ranks - 1, "seen.json")["local"] == [str(ranks - 1), str(ranks)]


def test_inputs_and_records_travel(world: TorchrunWorld, tmp_path: Path, config: dict[str, str]) -> None:
    assert run(world, tmp_path / "a", "reads", 2, config).ok
    assert run(world, tmp_path / "b", "reads", 2, config).ok
    mine, theirs, again = (
        record(tmp_path / cell, rank, "given.json")["hf_config"] for cell, rank in (("a", 0), ("a", 1), ("b", 1))
    )
    assert mine == [config["hf_config"], "a tiny model"]
    assert theirs[1] == "a tiny model"
    assert theirs[0] != mine[0]
    assert again == theirs  # sent once
    assert not (tmp_path / "a" / "rank0001" / "scratch").exists()


def test_what_another_process_wrote_to_its_inputs_is_told_and_undone(
    world: TorchrunWorld, tmp_path: Path, config: dict[str, str]
) -> None:
    assert run(world, tmp_path / "a", "reads", 2, config).written == ()
    assert run(world, tmp_path / "b", "writes", 2, config).written == ("hf_config/config/data.txt was changed",)
    assert run(world, tmp_path / "c", "reads", 2, config).written == ()
    assert record(tmp_path / "c", 1, "given.json")["hf_config"][1] == "a tiny model"


def test_of_endless_output_the_end_travels(world: TorchrunWorld, tmp_path: Path, config: dict[str, str]) -> None:
    assert run(world, tmp_path / "cell", "prints", 2, config).ok
    here, there = ((tmp_path / "cell" / f"rank000{rank}" / "stdout.txt").read_bytes() for rank in (0, 1))
    assert len(there) == 1 << 20
    assert here.endswith(there)
    assert len(here) > len(there)


@pytest.mark.parametrize(
    ("entry", "ranks", "culprit", "text"),
    [
        ("raises", 2, 1, f"rank 1 (tp0 pp0 ep0 etp0 dp1 on {HOST}#0) raised in step load"),
        ("leaves", 3, 2, f"rank 2 (tp0 pp0 ep0 etp0 dp2 on {HOST}#1) died in step load: exit code 7"),
        ("killed", 3, 0, f"rank 0 (tp0 pp0 ep0 etp0 dp0 on {HOST}#0) died in step load: SIGKILL"),
    ],
)
def test_the_first_failure_is_named(
    world: TorchrunWorld, tmp_path: Path, config: dict[str, str], entry: str, ranks: int, culprit: int, text: str
) -> None:
    outcome = run(world, tmp_path / "cell", entry, ranks, config)
    assert (first(outcome).rank, first(outcome).text) == (culprit, text)
    assert not any(e.kind == "ok" for e in outcome.exits)
    assert outcome.seconds < 10
    assert run(world, tmp_path / "next", "trivial", 3, config).ok


def test_a_hang_ends_at_the_deadline_with_all_stacks(
    world: TorchrunWorld, tmp_path: Path, config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "deadline", 5.0)
    outcome = run(world, tmp_path / "cell", "hangs", 3, config)
    assert [e.kind for e in outcome.exits] == ["hung"] * 3
    assert first(outcome).rank == 0
    assert "sleeps_for_ever" in outcome.exits[0].stderr_tail
    assert "in all_reduce" in outcome.exits[2].stderr_tail
    assert outcome.seconds < 10


def test_cells_that_must_not_be_run(world: TorchrunWorld, tmp_path: Path, config: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs 4 ranks, and torchrun started 3"):
        world.run(cell("trivial", 4), tmp_path, config, Toy.claims)
    with pytest.raises(ValueError, match="family=toy is not claimed"):
        world.run(cell("trivial", 2), tmp_path, config, replace(Toy.claims, families=frozenset()))
    with pytest.raises(ValueError, match="this world is gloo"):
        world.run(replace(cell("trivial", 2), backend="nccl"), tmp_path, config, Toy.claims)


def test_an_exception_is_found_with_its_machine(world: TorchrunWorld, tmp_path: Path, config: dict[str, str]) -> None:
    outcome = run(world, tmp_path / "cell", "raises_with_a_record", 3, config)
    seen = Observation.read(cell("raises_with_a_record", 3), tmp_path / "cell", outcome)
    assert seen.crashes[0].rank == 2
    assert seen.crashes[0].detail == f"on {HOST}#1: ValueError: expert 7 is missing"


def ended(rank: int, **more: Any) -> RankExit:
    plain = RankExit(rank, code=3, signal=None, timed_out=False, last_step="load", stderr_tail="", coords="")
    return replace(plain, **more)


@pytest.mark.parametrize(
    ("exits", "rank"),
    [
        # A death and an exception within the skew of the clocks: the death. Later than that, it is a consequence.
        ([ended(0, seen=1.0, raised=0.9), ended(1, code=None, signal=9, seen=1.3)], 1),
        ([ended(0, seen=1.0, raised=0.9), ended(1, code=None, signal=6, seen=2.0)], 0),
        # An echo is never first, however early it is seen.
        ([ended(0, seen=0.2, raised=0.2, echo=True), ended(1, seen=1.0, raised=0.9)], 1),
        ([ended(0, timed_out=True, signal=9, code=None), ended(1, seen=4.9, raised=4.9, echo=True)], 0),
    ],
)
def test_who_was_first_on_several_clocks(exits: list[RankExit], rank: int) -> None:
    assert [e.rank for e in merge(exits) if e.first] == [rank]


def test_a_process_that_vanishes_is_named_and_the_rest_goes_on(tmp_path: Path, config: dict[str, str]) -> None:
    with (
        gathered([0, 1], TOY_PIDS=str(tmp_path)) as (coordinator, others),
        pytest.MonkeyPatch.context() as patch,
        TorchrunWorld(coordinator, "gloo", deadline=60, grace=1) as world,
    ):
        patch.setenv("TOY_PIDS", str(tmp_path))
        world.start()
        fork_servers = processes("moeref_conformance.worlds.fork_server", f"fork_server\0{others[0].pid}\0")
        assert len(fork_servers) == 1
        killer = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, sys, time, pathlib\n"
                "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
                "os.kill(int(sys.argv[2]), 9)",
                str(tmp_path / "rank1"),
                str(others[0].pid),
            ]
        )
        coords_text(Layout(world=2), 1)  # imports megatron-core, which takes its time
        began = time.monotonic()
        outcome = world.run(cell("waits", 2), tmp_path / "cell", config, Toy.claims)
        killer.wait()
        assert outcome.error.startswith(f"rank 1 (tp0 pp0 ep0 etp0 dp1 on {HOST}#1): the process that torchrun")
        assert "its connection was closed" in outcome.error
        assert time.monotonic() - began < 30
        ranks = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
        assert gone([*fork_servers, *ranks])
        assert run(world, tmp_path / "alone", "trivial", 1, config).ok
        assert "rank 1" in world.run(cell("trivial", 2), tmp_path / "again", config, Toy.claims).error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_rank_0_the_others_end(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    both = [process(rank, [0, 0], port, TOY_PIDS=str(tmp_path), TMPDIR=str(tmp_path)) for rank in (0, 1)]
    try:
        until = time.monotonic() + 120
        while not all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < until
            assert both[0].poll() is None, both[0].communicate()
            time.sleep(0.1)
        fork_servers = [pid for each in both for pid in processes("worlds.fork_server", f"fork_server\0{each.pid}\0")]
        assert len(fork_servers) == 4  # and the ranks that they forked
        both[0].send_signal(number)
        (_, told), (out, error) = both[0].communicate(timeout=60), both[1].communicate(timeout=60)
        ranks = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
        assert gone([*fork_servers, *ranks])
        assert out == ""
        if number == signal.SIGKILL:
            assert both[1].returncode == 2
            assert error == f"moeref-conformance: rank 1 on {HOST}: the process of rank 0 is gone\n"
        else:  # in order
            assert "KeyboardInterrupt" in told
            assert (both[1].returncode, error) == (0, "")
            assert list(tmp_path.glob("moeref-conformance-*")) == []
    finally:
        for each in both:
            each.kill()


def test_a_process_that_is_ended_says_so(tmp_path: Path) -> None:
    with gathered([0, 0]) as (coordinator, others):
        others[0].send_signal(signal.SIGTERM)
        _, error = others[0].communicate(timeout=60)
        assert (others[0].returncode, error) == (2, f"moeref-conformance: rank 1 on {HOST}: it was ended by SIGTERM\n")
        with (
            TorchrunWorld(coordinator, "gloo") as world,
            pytest.raises(WorldError, match=r"rank 1 \(.*\): the process that"),
        ):
            world.start()


def test_processes_that_differ_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "transformers-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    says = rf"differ in transformers: 5\.\S+ for rank 0 \({HOST}\), 9\.9\.9 for rank 1"
    with pytest.raises(BadInput, match=says), gathered([0, 0], FIRST=str(tmp_path)):
        raise AssertionError("they were gathered")


def test_packing(tmp_path: Path) -> None:
    folder = tmp_path / "from" / "rank0007"
    (folder / "scratch").mkdir(parents=True)
    (folder / "scratch" / "x").write_text("stays")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "y").write_bytes(b"\0\n" * 5)
    (folder / "dangling").symlink_to("nowhere")
    unpack(pack({"": folder, "tokens": folder / "deep" / "er" / "y"}), tmp_path / "to")
    files = {str(p.relative_to(tmp_path / "to")) for p in (tmp_path / "to").rglob("*") if p.is_file()}
    assert files == {"rank0007/deep/er/y", "tokens/y"}
    assert (tmp_path / "to" / "tokens" / "y").read_bytes() == b"\0\n" * 5


def test_connections_carry_messages_and_bytes() -> None:
    with socket.create_server(("localhost", 0)) as server:
        here = connection_over(socket.create_connection(server.getsockname()))
        there = connection_over(server.accept()[0])
    here.send(({"a": "x\ny"}, b"\n{}\n" * 10_000))
    assert there.recv() == ({"a": "x\ny"}, b"\n{}\n" * 10_000)
    there.send(({}, b""))
    assert here.recv() == ({}, b"")
