"""Watching the ranks of one cell: deadlines, who failed first, and leaving no process behind.

Ranks are watched through pidfds in one selector, so the fork server needs no thread and no SIGCHLD handler for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Layout
from moeref_conformance.contract.exits import RankExit, mark_first
from moeref_conformance.contract.records import RankRecord, rank_dir
from moeref_conformance.worlds.rank import END, FINISHED, LEAVE, STACKS, CellRun

STDERR_TAIL = 8000  # characters
_MODULES = re.compile(r"(?m)^Extension modules: .*\n?")  # thousands of characters, below the stack of a native crash
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
#: gloo connects when a pair is first used: to a peer that has already gone, the connection is refused.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection refused",
    "Connection refused",
    "Connection was likely closed",
    "ncclRemoteError",
)


@dataclass
class _Rank:
    pid: int
    status: int | None = None  # as waitpid gives it
    finished: bool = False
    raised: float = 0.0  # when its exception came, if one did
    seen: float = 0.0  # when its message, or its end, was seen
    timed_out: bool = False
    killed: bool = False
    record: RankRecord | None = None  # as it was when the deadline came

    @property
    def failed(self) -> bool:
        """It ended, but not by finishing with code 0."""
        return self.status is not None and not (self.finished and self.status == 0)


class Watch:
    """Waits for the ranks of a request. `run()` returns when every one is gone; then `exits()` says how each ended.

    `pids` has the ranks by number, `begin` is a time before the first was forked: a rank may raise before all are.
    `done` carries the ranks' messages, closing `go` lets finished ranks leave. After the deadline ranks that have not
    finished write their stacks and are ended; after a first failure the others have the seconds of grace. What the
    parent says on `channel` is read meanwhile: `END` is a failure elsewhere. Where ranks run elsewhere too, `FINISHED`
    is sent when those here have finished, and they stay until `LEAVE` comes.
    """

    def __init__(
        self, pids: dict[int, int], begin: float, done: int, go: int, channel: Connection[Any, Any], request: CellRun
    ) -> None:
        self.ranks = {number: _Rank(pid) for number, pid in pids.items()}
        self.done, self.go, self.channel, self.request = done, go, channel, request
        self.hold = len(pids) < request.size
        self.begin = begin
        self.deadline, self.grace_ends = self.begin + request.deadline, float("inf")
        self.seconds = 0.0  # since the beginning, when it last looked
        self.words = b""
        self.ending = self.told = False

    def run(self) -> None:
        """Raises EOFError or ConnectionError if the parent goes away first. No rank is left in either case."""
        os.set_blocking(self.done, False)
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_end:
            at_end.callback(self._end)
            for rank in self.ranks.values():
                pidfd = os.pidfd_open(rank.pid)
                at_end.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, rank)
            selector.register(self.done, selectors.EVENT_READ)
            selector.register(self.channel, selectors.EVENT_READ)
            while any(r.status is None for r in self.ranks.values()):
                self._step(selector)

    def _step(self, selector: selectors.BaseSelector) -> None:
        ready = selector.select(max(0.0, min(self.deadline, self.grace_ends) - time.monotonic()))
        self.seconds = time.monotonic() - self.begin
        word = self.channel.recv() if any(key.fileobj is self.channel for key, _ in ready) else ""
        self._listen()
        for key, _ in ready:
            if isinstance(key.data, _Rank):
                selector.unregister(key.fileobj)
                key.data.seen = key.data.seen or self.seconds
                _kill_group(key.data.pid)  # what it started, before its pid can be reused
                _, key.data.status = os.waitpid(key.data.pid, 0)
        self.hold = self.hold and word != LEAVE
        if not self.ending and (word == END or any(r.failed for r in self.ranks.values())):
            self.grace_ends = min(self.grace_ends, time.monotonic() + self.request.grace)
            self._release()
        if all(r.finished or r.status is not None for r in self.ranks.values()):
            if not self.hold:
                self._release()
            elif not self.told and all(r.finished for r in self.ranks.values()):
                self.told = True
                self.channel.send(FINISHED)
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
                self.ranks[int(rank)].seen = self.seconds

    def _limits(self) -> None:
        now = time.monotonic()
        if now < min(self.deadline, self.grace_ends):
            return
        left = {n: r for n, r in self.ranks.items() if r.status is None and (self.ending or not r.finished)}
        if now >= self.deadline and not self.ending and left:
            self._write_stacks(left)
        for rank in left.values():
            rank.killed = True
            _kill_group(rank.pid)
        self._release()
        self.ending = True
        self.deadline, self.grace_ends = now + LEAVE_SECONDS, float("inf")

    def _write_stacks(self, hung: Mapping[int, _Rank]) -> None:
        for number, rank in hung.items():
            rank.timed_out = True
            # Read before the signal: it ends a native sleep, and the rank may go on to its next step.
            rank.record = RankRecord(number, rank_dir(self.request.cell_dir, number))
            rank.record.events  # noqa: B018 - a cached property
        for rank in hung.values():
            os.kill(rank.pid, STACKS)
        time.sleep(STACK_SECONDS)

    def _release(self) -> None:
        if self.go >= 0:
            os.close(self.go)
            self.go = -1

    def _end(self) -> None:
        self._release()
        for rank in self.ranks.values():
            if rank.status is None:
                _kill_group(rank.pid)
                _, rank.status = os.waitpid(rank.pid, 0)

    def exits(self) -> tuple[RankExit, ...]:
        """How each rank ended, with the first failure marked."""
        return mark_first([self._exit(number, rank) for number, rank in self.ranks.items()])

    def _exit(self, number: int, rank: _Rank) -> RankExit:
        if rank.status is None:
            raise RuntimeError(f"rank {number} has not ended")
        folder = rank_dir(self.request.cell_dir, number)
        record, tail = rank.record or RankRecord(number, folder), _tail(folder / "stderr.txt")
        code = os.waitstatus_to_exitcode(rank.status)
        return RankExit(
            rank=number,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=rank.timed_out,
            last_step=record.last_step,
            stderr_tail=tail,
            coords=_coords(self.request.cell.layout, number),
            killed=rank.killed,
            finished=rank.finished,
            echo=rank.raised > 0 and any(text in tail for text in ECHOES),
            seen=rank.seen if rank.failed else 0.0,
            raised=rank.raised,
            events=len(record.events),
            waits=rank.timed_out and any(frame in tail for frame in COLLECTIVE_FRAMES),
        )


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4 * STDERR_TAIL))
        text = file.read().decode(errors="replace")
    return _MODULES.sub("", text)[-STDERR_TAIL:]


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
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none: reading what /proc says of all processes takes milliseconds
        return frozenset()
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
