"""Watching the ranks of one cell: deadlines, who failed first, and leaving no process behind.

Ranks are watched through pidfds in one selector, so the fork server needs no thread and no SIGCHLD handler for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Layout
from moeref_conformance.contract.exits import RankExit, mark_first
from moeref_conformance.contract.records import RankRecord, rank_dir
from moeref_conformance.worlds.rank import STACKS

STDERR_TAIL = 8000  # characters
STACK_SECONDS = 0.5  # for hung ranks to write their stacks
LEAVE_SECONDS = 10.0  # for finished ranks to leave once released
#: A rank with one of these in its stack is blocked in a collective.
COLLECTIVE_FRAMES = (
    "distributed_c10d.py",
    "moeref_conformance/worlds/collectives.py",
    "moeref_conformance/worlds/staged.py",
)
#: Secondary errors: what gloo, NCCL and the store raise in a rank that has lost a peer. The kernel closes a dying
#: process's connections before its end can be seen, so such an error may come before the death that caused it.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection refused",
    "Connection was likely closed",
    "ncclRemoteError",
)


class ParentGone(Exception):
    """The process that started the fork server has ended: end everything and leave."""


class Channel:
    """JSON lines from and to the parent. Every method raises ParentGone when the parent is no longer there."""

    def __init__(self, channel: socket.socket) -> None:
        self.socket = channel
        self._pending = b""
        self._lines: list[dict[str, Any]] = []

    def read(self) -> None:
        """Wait for bytes and keep the whole lines among them."""
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise ParentGone
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self._lines += [json.loads(line) for line in lines]

    def take(self, key: str) -> dict[str, Any] | None:
        """The oldest line that has this key, if one has come."""
        for line in self._lines:
            if key in line:
                self._lines.remove(line)
                return line
        return None

    def request(self) -> dict[str, Any]:
        """Wait for the request of the next cell. Late messages about an earlier cell are dropped."""
        while True:
            while self._lines:
                if "cell" in (line := self._lines.pop(0)):
                    return line
            self.read()

    def say(self, message: dict[str, Any]) -> None:
        """One line to the parent."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ParentGone from error


@dataclass
class _Rank:
    number: int
    pid: int
    status: int | None = None  # as waitpid gives it
    finished: bool = False
    raised: float = 0.0  # when its exception came, if one did
    seen: float = 0.0  # when its message, or its end, was seen
    timed_out: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """It ended, but not by finishing with code 0."""
        return self.status is not None and not (self.finished and self.status == 0)


class Watch:
    """Waits for the ranks of a cell. `run()` returns when every one is gone; then `exits()` says how each ended.

    `pids` has the ranks by number. `done` carries the ranks' messages, closing `go` lets finished ranks leave. After
    `deadline` seconds ranks that have not finished write their stacks and are ended; after a first failure the others
    have `grace` seconds. The parent's lines on `channel` are read meanwhile: {"end": true} is a failure elsewhere.
    With `hold`, ranks run elsewhere too: {"finished": true} is sent when those here have, and they stay until
    {"leave": true} comes.
    """

    def __init__(
        self,
        pids: dict[int, int],
        done: int,
        go: int,
        channel: Channel,
        deadline: float,
        grace: float,
        hold: bool = False,
    ) -> None:
        self.ranks = {number: _Rank(number, pid) for number, pid in pids.items()}
        self.done, self.go, self.grace, self.channel, self.hold = done, go, grace, channel, hold
        self.begin = time.monotonic()
        self.deadline, self.grace_ends = self.begin + deadline, float("inf")
        self.words = b""
        self.wake = 0.0
        self.ending = self.told = False

    def run(self) -> None:
        """Raises ParentGone if the parent goes away first. No rank is left in either case."""
        os.set_blocking(self.done, False)
        with selectors.DefaultSelector() as selector:
            pidfds: list[int] = []
            try:
                for rank in self.ranks.values():
                    pidfds.append(os.pidfd_open(rank.pid))
                    selector.register(pidfds[-1], selectors.EVENT_READ, rank)
                selector.register(self.done, selectors.EVENT_READ)
                selector.register(self.channel.socket, selectors.EVENT_READ)
                while any(r.status is None for r in self.ranks.values()):
                    self._step(selector)
            finally:
                self._release()
                for rank in self.ranks.values():
                    if rank.status is None:
                        _kill_group(rank.pid)
                        _, rank.status = os.waitpid(rank.pid, 0)
                for fd in pidfds:
                    os.close(fd)

    def _step(self, selector: selectors.BaseSelector) -> None:
        ready = selector.select(max(0.0, min(self.deadline, self.grace_ends) - time.monotonic()))
        self.wake = time.monotonic() - self.begin
        if any(key.fileobj is self.channel.socket for key, _ in ready):
            self.channel.read()
        self._listen()
        for key, _ in ready:
            if isinstance(key.data, _Rank):
                selector.unregister(key.fileobj)
                key.data.seen = key.data.seen or self.wake
                _kill_group(key.data.pid)  # what it started, before its pid can be reused
                _, key.data.status = os.waitpid(key.data.pid, 0)
        words = [word for word in ("end", "leave") if self.channel.take(word)]
        self.hold = self.hold and "leave" not in words
        if not self.ending and ("end" in words or any(r.failed for r in self.ranks.values())):
            self.grace_ends = min(self.grace_ends, time.monotonic() + self.grace)
            self._release()
        if all(r.finished or r.status is not None for r in self.ranks.values()):
            if self.hold and not self.told and all(r.finished for r in self.ranks.values()):
                self.told = True
                self.channel.say({"finished": True})
            if not self.hold:
                self._release()
        self._limits()

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.done, 1 << 16):
                self.words += chunk
        *lines, self.words = self.words.split(b"\n")
        for line in lines:
            word, rank, *when = line.decode().split()
            if word == "finished":
                self.ranks[int(rank)].finished = True
            else:
                self.ranks[int(rank)].raised = int(when[0]) / 1e9 - self.begin
                self.ranks[int(rank)].seen = self.wake

    def _limits(self) -> None:
        now = time.monotonic()
        if now < min(self.deadline, self.grace_ends):
            return
        left = [r for r in self.ranks.values() if r.status is None and (self.ending or not r.finished)]
        hung = now >= self.deadline and not self.ending
        if hung and left:
            for rank in left:
                rank.timed_out = True
                os.kill(rank.pid, STACKS)
            time.sleep(STACK_SECONDS)
        for rank in left:
            rank.killed = True
            _kill_group(rank.pid)
        self._release()
        self.ending = True
        self.deadline, self.grace_ends = now + LEAVE_SECONDS, float("inf")

    def _release(self) -> None:
        if self.go >= 0:
            os.close(self.go)
            self.go = -1

    def exits(self, cell_dir: Path, layout: Layout) -> tuple[RankExit, ...]:
        """How each rank ended, with the first failure marked."""
        found = []
        for number, rank in self.ranks.items():
            folder = rank_dir(cell_dir, number)
            record, tail = RankRecord(number, folder), _tail(folder / "stderr.txt")
            status = 0 if rank.status is None else rank.status
            found.append(
                RankExit(
                    rank=number,
                    code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                    signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                    timed_out=rank.timed_out,
                    last_step=record.last_step,
                    stderr_tail=tail,
                    coords=_coords(layout, number),
                    killed=rank.killed,
                    finished=rank.finished,
                    echo=rank.raised > 0 and any(text in tail for text in ECHOES),
                    seen=rank.seen if rank.failed else 0.0,
                    raised=rank.raised,
                    events=len(record.events),
                    waits=rank.timed_out and any(frame in tail for frame in COLLECTIVE_FRAMES),
                )
            )
        return mark_first(found)


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - STDERR_TAIL))
        return file.read().decode(errors="replace")


def _coords(layout: Layout, rank: int) -> str:
    """The coordinates of a rank by megatron-core's RankGenerator; empty where megatron-core is not installed."""
    import importlib.util

    if importlib.util.find_spec("megatron") is None:
        return ""
    from moeref_conformance.contract.topology import coords_text

    return coords_text(layout, rank)


def _kill_group(pid: int) -> None:
    """End a rank that has not been waited for, and its process group, which exists as soon as the rank has settled."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def children() -> frozenset[int]:
    """The pids of this process's children, zombies included. As a subreaper it also inherits orphans below it."""
    found, me = set(), os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # "pid (name) state ppid ...": the name may hold spaces and parentheses.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == me:
                    found.add(int(entry.name))
    return frozenset(found)


def end_strays(keep: frozenset[int]) -> int:
    """End and reap all children but `keep`, and the orphans this brings up, until none is left. Returns how many."""
    ended = 0
    while strays := children() - keep:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            ended += 1
    return ended
