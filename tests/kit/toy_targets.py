"""Targets and rank entries that behave well or badly in one way each: what the tests of the world run."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from moeref_conformance.contract.api import Cell, Claims, Info, Session, Target, World


class Toy:
    """A target that can be resolved and claims the toy family; the entries below never open it."""

    info = Info(name="toy", version="0")
    claims = Claims(facets=frozenset(), families=frozenset({"toy"}), backends=frozenset({"gloo", "gloo-cuda", "nccl"}))

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        raise NotImplementedError


target = Toy()


def event(folder: Path, step: str, phase: str) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "phase": phase}) + "\n")


def trivial(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """One all-reduce; what the rank found about itself goes to seen.json."""
    event(folder, "open", "begin")
    x = torch.tensor([float(world.rank)])
    dist.all_reduce(x)
    seen = {"pid": os.getpid(), "sid": os.getsid(0), "rank": world.rank, "sum": x.item(), "env": os.environ["RANK"]}
    seen["local"] = [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]]
    (folder / "seen.json").write_text(json.dumps(seen))
    assert world.workdir.is_dir()
    event(folder, "open", "ok")


def _behave(world: World, folder: Path, bad: int) -> None:
    """Rank `bad` misbehaves by the family's tag; the others wait for it in a collective."""
    event(folder, "load", "begin")
    if world.rank != bad:
        dist.all_reduce(torch.ones(1))
        event(folder, "load", "ok")


def raises(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    _behave(world, folder, 1)
    if world.rank == 1:
        raise ValueError("expert 7 is missing")


def refused(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Rank 1 raises; rank 0 has not used its connection to it yet, and raises earlier what gloo says then."""
    event(folder, "load", "begin")
    if world.rank == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused")
    time.sleep(0.3)
    raises(target, cell, world, inputs, folder)


def leaves(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    _behave(world, folder, 2)
    os._exit(7)


def killed(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    _behave(world, folder, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def quits(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Leaves with code 0 in the middle: must not pass for having finished."""
    os._exit(0)


def hangs(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    event(folder, "open", "ok")
    if world.rank == 0:
        sleeps_for_ever()
    event(folder, "load", "begin")
    dist.all_reduce(torch.ones(1))


def sleeps_for_ever() -> None:
    while True:
        time.sleep(60)


def sleeps_natively(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """A sleep that any signal ends, after which the rank goes on to the next step, and raises there."""
    event(folder, "load", "begin")
    ctypes.CDLL(None).sleep(600)
    event(folder, "load", "ok")
    event(folder, "forward", "begin")
    raise ValueError("woken")


def crashes_natively(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    event(folder, "load", "begin")
    print("about to read", file=sys.stderr)
    ctypes.string_at(0)


def one_leaves_early(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Rank 0 has finished long before the others; it must stay reachable."""
    dist.all_reduce(torch.ones(1))
    if world.rank:
        time.sleep(0.3)


def prints(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    for _ in range(64):
        print("x" * 65536)
        print("y" * 65536, file=sys.stderr)
    os.write(1, b"native\n")


def grandchildren(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Leaves one process in its own group and one that became a daemon in a session of its own."""
    code = "import time; time.sleep(600)"
    plain = subprocess.Popen([sys.executable, "-c", code])
    daemon = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    (folder / "pids.json").write_text(json.dumps([plain.pid, daemon.pid]))


def splits_disagree(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Rank 1 expects three rows of rank 0, which sends one: gloo alone under-fills silently."""
    event(folder, "forward", "begin")
    send, expect = ([1, 1], [1, 0]) if world.rank == 0 else ([0, 0], [3, 0])
    out = torch.zeros(sum(expect), 4)
    dist.all_to_all_single(out, torch.ones(sum(send), 4), expect, send)
    event(folder, "forward", "ok")


def waits_for_test(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    (folder / "pid").write_text(str(os.getpid()))
    sleeps_for_ever()


def grandchildren_then_wait(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "pid").write_text(f"{os.getpid()} {daemon.pid}")
    sleeps_for_ever()


class Dispatching:
    """Runs the entry that the cell's tag names, so that one fork server serves every test."""

    def __call__(self, target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
        globals()[cell.tags[0]](target, cell, world, inputs, folder)


dispatch = Dispatching()
