"""The parent's side of a world of forked ranks: starts the fork server and sends it cells.

A failure of the target shows in the exits of a RunOutcome. `RunOutcome.error` is for failures of the kit: the fork
server did not start (the target could not be imported, say) or died. After a death the next `run` starts a new one.

Lines to the server: a request has "cell", "cell_dir", "inputs", "deadline", "grace" and "staged"; for a part of a cell
also "ranks" (those to fork), "store" ({"tcp": [host, port], "prefix": text}) and "local" ({rank: index on this
machine}). While ranks run, {"end": true} and {"leave": true} as in `ForkedWorld.end` and `leave`. Lines from it:
{"ready": facts}, then for each cell {"forked": pids}, {"finished": true} for a part of one, and {"exits", "seconds",
"strays"} or {"error", "traceback"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moeref_conformance.contract.api import Cell, Claims, to_plain
from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.exits import RankExit, RunOutcome, signal_name

ENTRY = "moeref_conformance.steps.run:run_rank"
START_SECONDS = 300.0  # imports of torch, megatron-core and the target on a slow, shared machine
LEAVE_SECONDS = 10.0
LOG_TAIL = 4000  # characters


class WorldError(RuntimeError):
    """The fork server could not be started, or died."""


@dataclass(frozen=True)
class Part:
    """The ranks of a cell that this world forks, where other ranks of it run elsewhere.

    All ranks meet in the TCP store at `store`, which another process serves, under `prefix`. `local` has every rank of
    the cell that runs on this machine, with its index there. `finished` is called once, when these ranks have done
    their work; they stay, so that no peer loses its connection, until `ForkedWorld.leave`.
    """

    ranks: tuple[int, ...]
    local: Mapping[int, int]
    store: tuple[str, int]
    prefix: str
    finished: Callable[[], None] = lambda: None


class ForkedWorld:
    """Runs cells of one backend ("gloo", "gloo-cuda" or "nccl") with one forked process a rank.

    `target_spec` is a target's name or `module:attr`, resolved in the fork server, never here. A cell may take
    `deadline` seconds; when a rank has failed, the others have `grace` seconds more. `entry` is what each rank calls.
    With `staged` CPU tensors go through the staged backend as well. Use it as a context manager, and start it from a
    thread that lives as long as it does.
    """

    def __init__(
        self,
        target_spec: str,
        *,
        deadline: float = 120.0,
        grace: float = 3.0,
        entry: str = ENTRY,
        backend: str = "gloo",
        staged: bool = False,
    ) -> None:
        if deadline <= 0 or grace < 0:
            raise ValueError(f"deadline {deadline} must be positive and grace {grace} not negative")
        if backend not in RANK_BACKENDS:
            raise ValueError(f"world {backend!r} has no forked ranks: use one of {', '.join(RANK_BACKENDS)}")
        self.target_spec, self.entry, self.backend, self.staged = target_spec, entry, backend, staged
        self.deadline, self.grace = deadline, grace
        #: What the fork server said when it was ready: versions, seconds of the imports, the target's info and claims.
        self.facts: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._pending = b""
        self._ranks: list[int] = []
        self._refused = ""  # why the target cannot be served: importing it again would not help

    def __enter__(self) -> ForkedWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Start the fork server unless it is running, and return its facts. Raises WorldError with its reason."""
        if self._process is not None and self._process.poll() is None:
            return self.facts
        if self._refused:
            raise WorldError(self._refused)
        self.close()
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # As multiprocessing does: what can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        if not RANK_BACKENDS[self.backend].on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "moeref_conformance.worlds.fork_server", "--fd", str(theirs.fileno())]
        command += ["--parent", str(os.getpid()), "--target", self.target_spec, "--entry", self.entry]
        self._process = subprocess.Popen(
            [*command, "--backend", self.backend],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches the parent only, which then ends the fork server in order
        )
        theirs.close()
        self._channel = ours
        try:
            answer = self._receive(time.monotonic() + START_SECONDS)
        except WorldError as error:
            self.close()
            raise WorldError(f"target {self.target_spec!r}: {error}") from error
        if "ready" not in answer:
            self.close()
            self._refused = f"target {self.target_spec!r} cannot be served: {answer['error']}\n{answer['traceback']}"
            raise WorldError(self._refused)
        self.facts = answer["ready"]
        return self.facts

    def run(
        self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims, part: Part | None = None
    ) -> RunOutcome:
        """Run one cell, or a part of one; records go to `<cell_dir>/rank0003/`. `inputs` needs at least "hf_config" (a
        folder).

        Raises ValueError, before anything is started, for a cell that `claims` does not cover or that belongs in
        another world, for inputs without "hf_config", for ranks that the cell does not have or that have no local
        index, and for a folder that holds records already.
        """
        cell_dir = cell_dir.resolve()
        reason = claims.why_not(cell)
        if reason is not None:
            raise ValueError(f"cell {cell.id} must not be run: {reason}")
        if cell.backend != self.backend:
            raise ValueError(f"cell {cell.id} must not be run: this world is {self.backend}")
        if "hf_config" not in inputs:
            raise ValueError(f"cell {cell.id}: inputs {sorted(inputs)} lack 'hf_config'")
        if any(cell_dir.glob("rank[0-9]*")):
            raise ValueError(f"cell {cell.id}: {cell_dir} holds the records of an earlier run")
        if part is not None and not set(part.ranks) <= set(part.local) & set(range(cell.layout.world)):
            raise ValueError(f"cell {cell.id}: ranks {part.ranks} must be of its {cell.layout.world} and in local")
        begin = time.monotonic()
        request = {
            "cell": to_plain(cell),
            "cell_dir": str(cell_dir),
            "inputs": inputs,
            "deadline": self.deadline,
            "grace": self.grace,
            "staged": self.staged,
        }
        if part is not None:
            request |= {"ranks": list(part.ranks), "local": {str(r): i for r, i in part.local.items()}}
            request |= {"store": {"tcp": list(part.store), "prefix": part.prefix}}
        try:
            self.start()
            answer = self._ask(request, part.finished if part else lambda: None)
        except WorldError as error:
            return RunOutcome((), time.monotonic() - begin, error=str(error))
        if "error" in answer:
            return RunOutcome((), time.monotonic() - begin, error=f"{answer['error']}\n{answer['traceback']}")
        exits = tuple(RankExit(**e) for e in answer["exits"])
        return RunOutcome(exits, answer["seconds"], strays=answer["strays"])

    def end(self) -> None:
        """Another rank of the cell failed elsewhere: the ranks here have `grace` seconds more. From any thread."""
        self._tell("end")

    def leave(self) -> None:
        """All ranks of the cell have finished, here and elsewhere: let those here go. From any thread."""
        self._tell("leave")

    def abort(self) -> None:
        """End the server and its ranks: a `start` or `run` under way fails. From any thread; `close` is still due."""
        channel, process = self._channel, self._process
        if channel is not None:
            with contextlib.suppress(OSError):  # already disconnected
                channel.shutdown(socket.SHUT_RDWR)
        if process is not None and not self.facts:
            process.kill()  # still importing, it does not read the socket

    def _tell(self, word: str) -> None:
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):  # the fork server died: `run` says so
                channel.sendall(json.dumps({word: True}).encode() + b"\n")

    def close(self) -> None:
        """End the fork server and all ranks, and wait until they are gone. Safe at any time, more than once."""
        if self._channel is not None:
            self._channel.close()  # at end of file the fork server ends everything
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its ranks die with it
                self._process.wait()
            self._process = None
        self._end_ranks()
        if self._log is not None:
            self._log.close()
            self._log = None
        self._pending = b""

    def _ask(self, request: dict[str, Any], finished: Callable[[], None]) -> dict[str, Any]:
        assert self._channel is not None
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            until = time.monotonic() + self.deadline + self.grace + 60
            answer = self._receive(until)
            while "forked" in answer or "finished" in answer:
                if "finished" in answer:
                    finished()
                self._ranks = answer.get("forked", self._ranks)
                answer = self._receive(until)
        except (OSError, WorldError) as error:
            told = str(error) if isinstance(error, WorldError) else self._death()
            self.close()
            raise WorldError(told) from error
        self._ranks = []
        return answer

    def _receive(self, until: float) -> dict[str, Any]:
        """The next JSON line. Raises WorldError at end of file or when `until` (monotonic seconds) has passed."""
        assert self._channel is not None
        while b"\n" not in self._pending:
            self._channel.settimeout(max(0.001, until - time.monotonic()))
            try:
                chunk = self._channel.recv(1 << 16)
            except TimeoutError:
                raise WorldError(f"the fork server gave no answer in time\n{self._tail()}") from None
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise WorldError(self._death())
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the fork server closed its connection\n{self._tail()}"
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        return f"the fork server died: {how}\n{self._tail()}"

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def _end_ranks(self) -> None:
        """End the process groups of ranks whose fork server died: what the ranks had started may outlive them."""
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._ranks = []
