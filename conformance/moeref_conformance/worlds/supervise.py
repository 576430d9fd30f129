"""Watching the ranks of one cell: deadlines, who failed first, and leaving no process behind.

Ranks are watched through pidfds in one selector, so the zygote needs no thread and no SIGCHLD handler for it.
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

from moeref_conformance.api import Layout
from moeref_conformance.worlds import RankExit
from moeref_conformance.worlds.rank import STACKS, record_dir

STDERR_TAIL = 8000  # characters
STACK_SECONDS = 0.5  # for hung ranks to write their stacks
LEAVE_SECONDS = 10.0  # for finished ranks to leave once released
#: In the stack of a rank that waits for others.
COLLECTIVE_FRAMES = ("distributed_c10d.py", "moeref_conformance/worlds/collectives.py")
#: What gloo and the store say to a rank whose peer is gone. The kernel closes a dying process's connections before its
#: end can be seen, so such an echo may come before the death that caused it.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connection refused")


class ParentGone(Exception):
    """The process that started the zygote has ended: end everything and leave."""


@dataclass
class _Rank:
    pid: int
    status: int | None = None  # as waitpid gives it
    finished: bool = False
    raised: tuple[int, int] | None = None  # wake-up at which its word came, monotonic ns of the exception
    ended: int = 0  # wake-up at which its end was seen
    timed_out: bool = False
    killed: bool = False
    first: bool = False
    echo: bool = False  # it raised because a peer was gone

    @property
    def failed(self) -> bool:
        """It ended otherwise than by finishing with code 0."""
        return self.status is not None and not (self.finished and self.status == 0)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Sorts failures: echoes last. Within one wake-up a death precedes exceptions."""
        return (self.echo, self.raised[0], 1, self.raised[1]) if self.raised else (self.echo, self.ended, 0, 0)


class Watch:
    """Waits for the ranks of a cell. `run()` returns when every one is gone; then `exits()` says how each ended.

    `done` carries the ranks' own words, closing `go` lets finished ranks leave, `channel` is watched for its end.
    After `deadline` seconds ranks that have not finished write their stacks and are ended; after a first failure the
    others have `grace` seconds.
    """

    def __init__(
        self, pids: list[int], done: int, go: int, channel: socket.socket, deadline: float, grace: float
    ) -> None:
        self.ranks = [_Rank(pid) for pid in pids]
        self.done, self.go, self.grace, self.channel = done, go, grace, channel
        self.deadline, self.grace_ends = time.monotonic() + deadline, float("inf")
        self.words = b""
        self.wakes = 0
        self.ending = False

    def run(self) -> None:
        """Raises ParentGone if the parent goes away first. No rank is left in either case."""
        os.set_blocking(self.done, False)
        with selectors.DefaultSelector() as selector:
            pidfds: list[int] = []
            try:
                for rank in self.ranks:
                    pidfds.append(os.pidfd_open(rank.pid))
                    selector.register(pidfds[-1], selectors.EVENT_READ, rank)
                selector.register(self.done, selectors.EVENT_READ)
                selector.register(self.channel, selectors.EVENT_READ)
                while any(r.status is None for r in self.ranks):
                    self._step(selector)
            finally:
                self._release()
                for rank in self.ranks:
                    if rank.status is None:
                        _kill_group(rank.pid)
                        _, rank.status = os.waitpid(rank.pid, 0)
                for fd in pidfds:
                    os.close(fd)

    def _step(self, selector: selectors.BaseSelector) -> None:
        ready = selector.select(max(0.0, min(self.deadline, self.grace_ends) - time.monotonic()))
        self.wakes += 1
        if any(key.fileobj is self.channel for key, _ in ready):
            if not self.channel.recv(1, socket.MSG_PEEK):
                raise ParentGone
            selector.unregister(self.channel)  # an early request is read after this cell
        self._listen()
        for key, _ in ready:
            if isinstance(key.data, _Rank):
                selector.unregister(key.fileobj)
                key.data.ended = self.wakes
                _kill_group(key.data.pid)  # what it started, before its number is free again
                _, key.data.status = os.waitpid(key.data.pid, 0)
        if not self.ending and any(r.failed for r in self.ranks):
            self.grace_ends = min(self.grace_ends, time.monotonic() + self.grace)
            self._release()
        if all(r.finished or r.status is not None for r in self.ranks):
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
                self.ranks[int(rank)].raised = (self.wakes, int(when[0]))

    def _limits(self) -> None:
        now = time.monotonic()
        if now < min(self.deadline, self.grace_ends):
            return
        left = [r for r in self.ranks if r.status is None and (self.ending or not r.finished)]
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
        events = [_events(record_dir(cell_dir, i)) for i in range(len(self.ranks))]
        tails = [_tail(record_dir(cell_dir, i) / "stderr.txt") for i in range(len(self.ranks))]
        for rank, tail in zip(self.ranks, tails, strict=True):
            rank.echo = rank.raised is not None and any(text in tail for text in ECHOES)
        own = [r for r in self.ranks if r.failed and not r.killed]
        hung = [r for r in self.ranks if r.timed_out]
        if own:
            min(own, key=lambda r: r.order).first = True
        elif hung:
            behind = min(len(events[i]) for i, r in enumerate(self.ranks) if r.timed_out)
            last = [i for i, r in enumerate(self.ranks) if r.timed_out and len(events[i]) == behind]
            # Of those, the ones that do not wait inside a collective are what the others wait for.
            busy = [i for i in last if not any(frame in tails[i] for frame in COLLECTIVE_FRAMES)]
            for i in busy or last:
                self.ranks[i].first = True
        return tuple(
            RankExit(
                rank=i,
                code=os.WEXITSTATUS(r.status) if r.status is not None and os.WIFEXITED(r.status) else None,
                signal=os.WTERMSIG(r.status) if r.status is not None and os.WIFSIGNALED(r.status) else None,
                timed_out=r.timed_out,
                last_step=str(events[i][-1].get("step", "start")) if events[i] else "start",
                stderr_tail=tails[i],
                coords=_coords(layout, i),
                first=r.first,
                killed=r.killed,
                finished=r.finished,
            )
            for i, r in enumerate(self.ranks)
        )


def _events(folder: Path) -> list[dict[str, Any]]:
    """The events a rank has written. The last line may be cut off where the rank was ended while writing it."""
    path = folder / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").split("\n")
    if lines[-1]:
        lines[-1] = ""
    return [json.loads(line) for line in lines if line]


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - STDERR_TAIL))
        return file.read().decode(errors="replace")


def _coords(layout: Layout, rank: int) -> str:
    """The place of a rank by megatron-core's own rule; empty where megatron-core is not installed."""
    import importlib.util

    if importlib.util.find_spec("megatron") is None:
        return ""
    from moeref_conformance.oracles.topology import coords_text

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
    """End and reap all children but `keep`, and the orphans this brings up, until none is left. Answers how many."""
    ended = 0
    while strays := children() - keep:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            ended += 1
    return ended
