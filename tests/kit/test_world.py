"""The world of forked ranks: every way a rank can end is recognised, named and survived. No process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.exits import RankExit, RunOutcome, mark_first
from moeref_conformance.contract.records import Observation
from moeref_conformance.worlds.forked import ForkedWorld, WorldError
from moeref_conformance.worlds.rank import CellRun, Part
from toy_targets import Toy

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
ENTRY = "toy_targets:dispatch"


@pytest.fixture(scope="module")
def world() -> Iterator[ForkedWorld]:
    with ForkedWorld("toy_targets:target", deadline=20, grace=2, entry=ENTRY) as found:
        yield found


def cell(entry: str, ranks: int = 2) -> Cell:
    return Cell(family="toy", layout_name=f"dp{ranks}", layout=Layout(world=ranks), tags=(entry,))


def run(world: ForkedWorld, folder: Path, entry: str, ranks: int = 2) -> RunOutcome:
    outcome = world.run(cell(entry, ranks), folder, {"hf_config": str(folder)}, Toy.claims)
    assert outcome.error == ""
    assert [e.rank for e in outcome.exits] == list(range(ranks))
    return outcome


def first(outcome: RunOutcome) -> RankExit:
    (found,) = [e for e in outcome.exits if e.first]
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pids: list[int], seconds: float = 5) -> bool:
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_ranks_finish(world: ForkedWorld, tmp_path: Path) -> None:
    outcome = run(world, tmp_path, "trivial", 4)
    assert outcome.ok
    assert outcome.strays == 0
    assert [e.coords for e in outcome.exits][1] == "tp0 pp0 ep0 etp0 dp1"
    assert all(e.last_step == "open" and e.code == 0 and not e.first for e in outcome.exits)
    seen = [json.loads((tmp_path / f"rank{r:04d}" / "seen.json").read_text()) for r in range(4)]
    assert [s["sum"] for s in seen] == [6.0] * 4
    assert [s["env"] for s in seen] == ["0", "1", "2", "3"]
    assert len({s["sid"] for s in seen}) == 4
    assert all(s["sid"] == s["pid"] for s in seen)
    assert world.facts["versions"]["megatron-core"]


def test_a_rank_that_finishes_early_waits_for_the_others(world: ForkedWorld, tmp_path: Path) -> None:
    assert run(world, tmp_path, "one_leaves_early", 3).ok


@pytest.mark.parametrize(
    ("entry", "ranks", "culprit", "kind", "code", "number", "text"),
    [
        ("raises", 2, 1, "raised", 3, None, "rank 1 (tp0 pp0 ep0 etp0 dp1) raised in step load"),
        ("refused", 2, 1, "raised", 3, None, "rank 1 (tp0 pp0 ep0 etp0 dp1) raised in step load"),
        ("leaves", 3, 2, "died", 7, None, "rank 2 (tp0 pp0 ep0 etp0 dp2) died in step load: exit code 7"),
        ("killed", 3, 0, "died", None, signal.SIGKILL, "rank 0 (tp0 pp0 ep0 etp0 dp0) died in step load: SIGKILL"),
    ],
)
def test_the_first_failure_is_named(
    world: ForkedWorld,
    tmp_path: Path,
    entry: str,
    ranks: int,
    culprit: int,
    kind: str,
    code: int | None,
    number: int | None,
    text: str,
) -> None:
    outcome = run(world, tmp_path, entry, ranks)
    found = first(outcome)
    assert (found.rank, found.kind, found.code, found.signal, found.text) == (culprit, kind, code, number, text)
    assert not outcome.ok
    assert not any(e.kind == "ok" for e in outcome.exits)
    assert outcome.seconds < 10


def test_what_was_raised_is_in_the_tail(world: ForkedWorld, tmp_path: Path) -> None:
    assert "ValueError: expert 7 is missing" in first(run(world, tmp_path, "raises")).stderr_tail


def test_leaving_with_code_0_is_not_finishing(world: ForkedWorld, tmp_path: Path) -> None:
    outcome = run(world, tmp_path, "quits", 1)
    assert not outcome.ok
    assert outcome.exits[0].kind == "died"
    assert "exit code 0 in step start before its work was over" in outcome.exits[0].text


def test_a_hang_ends_at_the_deadline_with_stacks(world: ForkedWorld, tmp_path: Path) -> None:
    world.deadline = 5
    try:
        outcome = run(world, tmp_path, "hangs", 3)
    finally:
        world.deadline = 20
    assert [e.kind for e in outcome.exits] == ["hung"] * 3
    assert first(outcome).rank == 0  # the one furthest behind
    assert "sleeps_for_ever" in outcome.exits[0].stderr_tail
    assert "in all_reduce" in outcome.exits[1].stderr_tail
    assert [e.last_step for e in outcome.exits] == ["open", "load", "load"]
    assert 5 <= outcome.seconds < 8
    assert run(world, tmp_path / "next", "trivial").ok


def test_a_hung_rank_is_in_the_step_in_which_the_deadline_found_it(world: ForkedWorld, tmp_path: Path) -> None:
    """A native sleep ends at the signal that asks for the stack."""
    world.deadline = 3
    try:
        outcome = run(world, tmp_path, "sleeps_natively", 1)
    finally:
        world.deadline = 20
    assert (tmp_path / "rank0000" / "events.jsonl").read_text().count("forward") == 1
    assert (outcome.exits[0].kind, outcome.exits[0].last_step, outcome.exits[0].events) == ("hung", "load", 1)
    (crash,) = Observation.read(cell("sleeps_natively", 1), tmp_path, outcome).crashes
    assert (crash.kind, crash.step) == ("hung", "load")
    assert "in sleeps_natively" in crash.detail


def test_a_native_crash_has_a_python_stack(world: ForkedWorld, tmp_path: Path) -> None:
    outcome = run(world, tmp_path, "crashes_natively", 1)
    assert outcome.exits[0].signal == signal.SIGSEGV
    (crash,) = Observation.read(cell("crashes_natively", 1), tmp_path, outcome).crashes
    assert "died in step load: SIGSEGV. about to read | Segmentation fault at " in crash.detail
    assert "in crashes_natively" in crash.detail
    assert "Extension modules" not in outcome.exits[0].stderr_tail
    assert len(crash.detail) < 500


def test_output_of_any_size_is_kept_in_files(world: ForkedWorld, tmp_path: Path) -> None:
    outcome = run(world, tmp_path, "prints")
    assert outcome.ok
    for rank in ("rank0000", "rank0001"):
        assert (tmp_path / rank / "stdout.txt").stat().st_size == 64 * 65537 + len("native\n")
        assert (tmp_path / rank / "stderr.txt").stat().st_size >= 64 * 65537
    assert len(outcome.exits[0].stderr_tail) <= 8000


def test_processes_left_behind_are_ended(world: ForkedWorld, tmp_path: Path) -> None:
    outcome = run(world, tmp_path, "grandchildren")
    assert outcome.ok
    assert outcome.strays == 4
    pids = [pid for r in (0, 1) for pid in json.loads((tmp_path / f"rank{r:04d}" / "pids.json").read_text())]
    assert len(pids) == 4
    assert gone(pids, 0.5)


def test_disagreeing_splits_are_named_on_every_rank(world: ForkedWorld, tmp_path: Path) -> None:
    outcome = run(world, tmp_path, "splits_disagree")
    assert [e.kind for e in outcome.exits] == ["raised", "raised"]
    assert "all_to_all_single in group [0, 1], rank 1: peers send [1, 0] rows, I expect [3, 0]" in (
        outcome.exits[1].stderr_tail
    )
    assert "peers send [1, 0] rows, rank 1 expects [3, 0]" in outcome.exits[0].stderr_tail
    assert run(world, tmp_path / "next", "trivial").ok


def test_a_dead_fork_server_is_a_kit_error_and_the_next_cell_runs(world: ForkedWorld, tmp_path: Path) -> None:
    os.kill(world.start()["pid"], signal.SIGKILL)
    outcome = world.run(cell("trivial"), tmp_path / "a", {"hf_config": "."}, Toy.claims)
    # Either it was seen dead and restarted at once, or its death was met in the middle.
    assert outcome.ok or "the fork server died: SIGKILL" in outcome.error
    assert run(world, tmp_path / "b", "trivial").ok


@pytest.mark.parametrize("name", ["cuda00001800007", "busy"])
def test_only_a_native_thread_of_libcuda_may_run_beside_the_fork_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_native.py").write_text(
        "import ctypes\n"
        "from toy_targets import target\n"
        "libc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
        "assert not libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)\n"
        f"assert not libc.pthread_setname_np(thread, {name.encode()!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ForkedWorld("toy_native:target", entry=ENTRY) as world:
        outcome = world.run(cell("trivial"), tmp_path / "cell", {"hf_config": "."}, Toy.claims)
    assert outcome.ok == (name != "busy")
    assert name != "busy" or "the fork server has 2 threads (MainThread)" in outcome.error


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("no_such_module:target", "cannot import no_such_module"),
        ("toy_targets:no_such_name", "no_such_name"),
        ("toy_threads:target", "threads"),
    ],
)
def test_a_target_that_cannot_be_served_is_explained(
    spec: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_threads.py").write_text(
        "import threading, time\n"
        "from toy_targets import target\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True, name='busy').start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ForkedWorld(spec, entry=ENTRY) as world:
        with pytest.raises(WorldError, match=part):
            world.start()
        outcome = world.run(cell("trivial"), tmp_path / "cell", {"hf_config": "."}, Toy.claims)
        assert part in outcome.error


def test_bad_requests_are_refused_before_anything_starts(tmp_path: Path) -> None:
    world = ForkedWorld("toy_targets:target", entry=ENTRY)
    with pytest.raises(ValueError, match="family=toy is not claimed"):
        world.run(cell("trivial"), tmp_path, {"hf_config": "."}, replace(Toy.claims, families=frozenset()))
    with pytest.raises(ValueError, match="lack 'hf_config'"):
        world.run(cell("trivial"), tmp_path, {}, Toy.claims)
    (tmp_path / "rank0000").mkdir()
    with pytest.raises(ValueError, match="records of an earlier run"):
        world.run(cell("trivial"), tmp_path, {"hf_config": "."}, Toy.claims)
    with pytest.raises(ValueError, match="this world is gloo"):
        world.run(replace(cell("trivial"), backend="nccl"), tmp_path / "a", {"hf_config": "."}, Toy.claims)
    part = Part(ranks=(2,), local={2: 0}, store=("localhost", 1), prefix="x")
    with pytest.raises(ValueError, match=r"ranks \(2,\) must be of its 2"):
        world.fork(CellRun(cell("trivial"), tmp_path / "a", {"hf_config": "."}, part, deadline=20, grace=2))
    with pytest.raises(ValueError, match="deadline"):
        ForkedWorld("x", deadline=0)
    with pytest.raises(ValueError, match="'static' has no forked ranks"):
        ForkedWorld("x", backend="static")
    assert world.facts == {}


class Halves:
    """A cell whose ranks two fork servers fork, as on two machines: 0 and 2 in the first, 1 in the second."""

    RANKS = ((0, 2), (1,))

    def __init__(self, worlds: list[ForkedWorld], pool: ThreadPoolExecutor) -> None:
        import torch.distributed as dist

        self.worlds, self.pool = worlds, pool
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.finished = [threading.Event() for _ in worlds]

    def run(self, entry: str, folder: Path) -> list[Future[RunOutcome]]:
        for event in self.finished:
            event.clear()
        return [
            self.pool.submit(
                world.fork,
                CellRun(
                    cell(entry, 3), folder / str(i), {"hf_config": "."},
                    Part(
                        ranks=ranks, local={rank: place for place, rank in enumerate(ranks)},
                        store=("localhost", self.store.port), prefix=folder.name,
                    ),
                    deadline=20, grace=1,
                ),
                self.finished[i].set,
            )
            for i, (world, ranks) in enumerate(zip(self.worlds, self.RANKS, strict=True))
        ]  # fmt: skip


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    worlds = [ForkedWorld("toy_targets:target", entry=ENTRY) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool, worlds[0], worlds[1]:
        for world in worlds:
            world.start()
        yield Halves(worlds, pool)


def test_parts_of_a_cell_stay_until_all_have_finished(halves: Halves, tmp_path: Path) -> None:
    running = halves.run("trivial", tmp_path)
    assert all(event.wait(20) for event in halves.finished)
    seen = [json.loads((tmp_path / str(r % 2) / f"rank{r:04d}" / "seen.json").read_text()) for r in range(3)]
    time.sleep(0.3)
    assert all(alive(s["pid"]) for s in seen)
    assert not any(future.done() for future in running)
    for world in halves.worlds:
        world.leave()
    outcomes = [future.result(10) for future in running]
    assert all(outcome.ok for outcome in outcomes)
    assert [[e.rank for e in outcome.exits] for outcome in outcomes] == [[0, 2], [1]]
    assert [s["sum"] for s in seen] == [3.0] * 3
    assert [(s["env"], s["local"]) for s in seen] == [("0", ["0", "2"]), ("1", ["0", "1"]), ("2", ["1", "2"])]


def test_a_failure_elsewhere_begins_the_grace_period(halves: Halves, tmp_path: Path) -> None:
    running = halves.run("hangs", tmp_path)
    until = time.monotonic() + 15
    while not (tmp_path / "1" / "rank0001" / "events.jsonl").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    begin = time.monotonic()
    for world in halves.worlds:
        world.end()
    outcomes = [future.result(10) for future in running]
    assert 0.9 < time.monotonic() - begin < 6
    assert {e.kind for outcome in outcomes for e in outcome.exits} <= {"killed", "raised"}
    assert not any(event.is_set() for event in halves.finished)


def test_a_failure_in_one_part_lets_the_other_be_told(halves: Halves, tmp_path: Path) -> None:
    running = halves.run("raises", tmp_path)
    failed = running[1].result(15)  # rank 1
    for world in halves.worlds:
        world.end()
    merged = mark_first([*running[0].result(15).exits, *(replace(e, host="node7") for e in failed.exits)])
    assert [e.text for e in merged if e.first] == ["rank 1 (tp0 pp0 ep0 etp0 dp1 on node7) raised in step load"], merged


def test_the_first_failure_of_many() -> None:
    died = RankExit(0, None, 9, False, "load", "", "", seen=2.0)
    raised = RankExit(1, 3, None, False, "load", "", "", seen=2.0, raised=1.9)
    echo = RankExit(2, 3, None, False, "load", "", "", seen=1.0, raised=0.9, echo=True)
    ended = RankExit(3, None, 9, False, "load", "", "", killed=True)
    late = RankExit(4, None, 9, True, "load", "", "", killed=True, events=3, waits=True)
    later = RankExit(5, None, 9, True, "load", "", "", killed=True, events=3)
    latest = RankExit(6, None, 9, True, "load", "", "", killed=True, events=4)

    def first_of(*exits: RankExit) -> list[int]:
        return [e.rank for e in mark_first(exits) if e.first]

    assert first_of(echo, raised, died, ended) == [0]
    assert first_of(echo, replace(raised, seen=1.5), died) == [1]
    assert first_of(echo, ended) == [2]
    assert first_of(late, later, latest) == [5]
    assert first_of(late, latest) == [4]
    assert first_of(ended) == []


def test_devices_of_the_worlds() -> None:
    assert [RANK_BACKENDS[name].device_of(3) for name in ("gloo", "gloo-cuda", "nccl")] == ["cpu", "cuda:0", "cuda:3"]
    assert [RANK_BACKENDS[name].on_gpu for name in ("gloo", "gloo-cuda", "nccl")] == [False, True, True]


def test_a_gpu_that_is_not_there_is_named(halves: Halves, tmp_path: Path) -> None:
    wanted = Part(ranks=(0,), local={0: 99}, store=("localhost", halves.store.port), prefix="gpu")
    with ForkedWorld("toy_targets:target", deadline=20, grace=1, entry=ENTRY, backend="nccl") as world:
        cell_on_gpus = replace(cell("trivial", 1), backend="nccl")
        outcome = world.fork(CellRun(cell_on_gpus, tmp_path, {"hf_config": "."}, wanted, deadline=20, grace=1))
    assert outcome.error == ""
    assert outcome.exits[0].kind == "raised"
    assert "rank 0 needs GPU 99 of this machine, and torch" in outcome.exits[0].stderr_tail
    assert world.facts["substitutions"] == ["router_gemm", "latent_attention_linear", "sequence_parallel_norm"]


def test_a_target_that_initialises_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_gpu.py").write_text(
        "import torch\n"
        "from toy_targets import target\n"
        "torch.cuda._initialized = True  # what torch.cuda.init() leaves behind\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        ForkedWorld("toy_gpu:target", entry=ENTRY, backend="gloo-cuda") as world,
        pytest.raises(
            WorldError, match="CUDA was initialised in the fork server by importing the target 'toy_gpu:target'"
        ),
    ):
        world.start()


PARENT = """
import sys
from pathlib import Path
from test_world import ENTRY, ForkedWorld, Toy, cell
with ForkedWorld("toy_targets:target", deadline=60, entry=ENTRY) as world:
    print(world.start()["pid"], flush=True)
    world.run(cell(sys.argv[2], 2), Path(sys.argv[1]), {"hf_config": "."}, Toy.claims)
"""


@pytest.mark.parametrize("entry", ["waits_for_test", "grandchildren_then_wait"])
def test_nothing_survives_a_killed_parent(tmp_path: Path, entry: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
    command = [sys.executable, "-c", PARENT, str(tmp_path), entry]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        files = [tmp_path / f"rank{r:04d}" / "pid" for r in (0, 1)]
        until = time.monotonic() + 30
        while not all(f.exists() and f.read_text() for f in files):
            assert time.monotonic() < until
            time.sleep(0.05)
        for file in files:
            pids += [int(pid) for pid in file.read_text().split()]
        assert all(alive(pid) for pid in pids)
        parent.kill()
    assert gone(pids)
