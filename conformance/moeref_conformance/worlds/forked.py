"""The parent's side of a world of forked ranks: starts the fork server and sends it cells.

A failure of the target shows in the exits of a RunOutcome. `RunOutcome.error` is for failures of the kit: the fork
server did not start (the target could not be imported, say) or died. After a death the next `run` starts a new one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from moeref_conformance.contract.api import Cell, Claims
from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.exits import RunOutcome, signal_name
from moeref_conformance.worlds import static
from moeref_conformance.worlds.rank import END, FINISHED, LEAVE, CellRun, Part

ENTRY = "moeref_conformance.steps.run:run_rank"
START_SECONDS = 300.0  # imports of torch, megatron-core and the target on a slow, shared machine
LEAVE_SECONDS = 10.0
LOG_TAIL = 4000  # characters


class WorldError(RuntimeError):
    """The fork server could not be started, or died."""


class BadTarget(WorldError, BadInput):
    """What was named is no target, or cannot be imported: the user's mistake, not one of the kit."""


def check_runs_here(cell: Cell, claims: Claims, backend: str) -> None:
    """Raise ValueError for a cell that `claims` does not cover or that belongs in a world of another backend.

    Static cells belong in any.
    """
    here = cell.backend in (backend, "static")
    reason = claims.why_not(cell) or (None if here else f"this world is {backend}")
    if reason:
        raise ValueError(f"cell {cell.id} must not be run: {reason}")


@dataclass
class _Server:
    """A fork server that has been started, and is `ready` once it has imported everything.

    `ranks` has the pids of those it has forked for the cell under way.
    """

    process: subprocess.Popen[bytes]
    channel: Connection[Any, Any]
    log: IO[bytes]
    ranks: list[int] = field(default_factory=list)
    ready: bool = False

    @classmethod
    def start(cls, target_spec: str, entry: str, backend: str) -> _Server:
        """It imports everything before it answers."""
        ours, theirs = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # As multiprocessing does: what can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        if not RANK_BACKENDS[backend].on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "moeref_conformance.worlds.fork_server", str(os.getpid())]
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), target_spec, entry, backend],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches the parent only, which then ends the fork server in order
        )
        theirs.close()
        return cls(process, ours, log)

    def send(self, message: Any) -> None:
        """Raises WorldError if it has died."""
        try:
            self.channel.send(message)
        except OSError as error:
            raise WorldError(self._death()) from error

    def receive(self, until: float) -> Any:
        """The next message. Raises WorldError if it has died or `until` (monotonic seconds) has passed."""
        try:
            if self.channel.poll(max(0.001, until - time.monotonic())):
                return self.channel.recv()
        except (EOFError, OSError) as error:
            raise WorldError(self._death()) from error
        raise WorldError(f"the fork server gave no answer in time\n{self._tail()}")

    def close(self) -> None:
        """End it and all ranks, and wait until they are gone. A thread that waits for an answer gets a WorldError."""
        # Then the fork server ends everything. Closing would tell it nothing while another thread waits here.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.channel.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)
        if not self.ready:  # it imports, and does not listen
            self.process.kill()
        try:
            self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its ranks die with it
            self.process.wait()
        for pid in self.ranks:  # the fork server died: what its ranks had started may outlive them
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.channel.close()
        self.log.close()

    def _death(self) -> str:
        try:
            code = self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the fork server closed its connection\n{self._tail()}"
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        return f"the fork server died: {how}\n{self._tail()}"

    def _tail(self) -> str:
        with contextlib.suppress(ValueError):  # closed in the meantime
            self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - LOG_TAIL))
            return self.log.read().decode(errors="replace")
        return ""


class ForkedWorld(AbstractContextManager["ForkedWorld"]):
    """Runs cells of one backend, one of `RANK_BACKENDS`, with one forked process a rank, and static cells.

    `target_spec` is a target's name or `module:attr`, resolved in the fork server, never here. `entry` is what each
    rank calls. `deadline`, `grace` and `staged` as in `CellRun`. Use it as a context manager, and start it from a
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
        #: What the fork server said when it was ready, with the target's info and claims. Empty before.
        self.facts: dict[str, Any] = {}
        self._server: _Server | None = None
        self._refused: WorldError | None = None  # why it cannot serve the target: importing it again would not help

    def __exit__(self, *_: object) -> None:
        self._refused = WorldError("this world is closed")  # another thread must not start it again
        self.close()

    def begin(self) -> None:
        """Start the fork server unless it is running. Several that are begun import side by side."""
        self._begun()

    def start(self) -> dict[str, Any]:
        """Start the fork server unless it is running, and return its facts. Raises WorldError with its reason."""
        self._running()
        return self.facts

    def _begun(self) -> _Server:
        if self._server is None or self._server.process.poll() is not None:
            if self._refused:
                raise self._refused
            self.close()
            self.facts = {}
            self._server = _Server.start(self.target_spec, self.entry, self.backend)
        return self._server

    def _running(self) -> _Server:
        server = self._begun()
        if server.ready:
            return server
        try:
            answer = server.receive(time.monotonic() + START_SECONDS)
        except WorldError as error:
            self.close()
            raise WorldError(f"target {self.target_spec!r}: {error}") from error
        if isinstance(answer, BadInput | str):
            self.close()
            why = f"target {self.target_spec!r} cannot be served: {answer}"
            self._refused = WorldError(why) if isinstance(answer, str) else BadTarget(str(answer))
            raise self._refused
        self.facts, server.ready = answer, True
        return server

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell; records go to `<cell_dir>/rank0003/`.

        Raises ValueError, before anything is started, for a cell that `claims` does not cover or that belongs in
        another world, and as `fork`.
        """
        check_runs_here(cell, claims, self.backend)
        ranks = range(cell.processes)
        part = Part(ranks, {rank: rank for rank in ranks})
        request = CellRun(cell, cell_dir.resolve(), inputs, part, self.deadline, self.grace, self.staged)
        outcome = self.fork(request)
        return static.answered(outcome, cell_dir) if cell.backend == "static" else outcome

    def fork(self, request: CellRun, finished: Callable[[], None] = lambda: None) -> RunOutcome:
        """Run a cell, or a part of one whose other ranks run elsewhere.

        When the ranks of a part have done their work, `finished` is called. They stay, so that no peer loses its
        connection, until `leave`. Raises ValueError for inputs without "hf_config", for ranks that the cell does not
        have or that have no local index, and for a folder that holds records already.
        """
        cell, part = request.cell, request.part
        if "hf_config" not in request.inputs:
            raise ValueError(f"cell {cell.id}: inputs {sorted(request.inputs)} lack 'hf_config'")
        if any(request.cell_dir.glob("rank[0-9]*")):
            raise ValueError(f"cell {cell.id}: {request.cell_dir} holds the records of an earlier run")
        if not set(part.ranks) <= set(part.local) & set(range(request.size)):
            raise ValueError(f"cell {cell.id}: ranks {part.ranks} must be of its {request.size} and in local")
        begin = time.monotonic()
        try:
            return self._ask(self._running(), request, finished)
        except WorldError as error:
            self.close()
            return RunOutcome((), time.monotonic() - begin, error=str(error))

    def _ask(self, server: _Server, request: CellRun, finished: Callable[[], None]) -> RunOutcome:
        until = time.monotonic() + request.deadline + request.grace + 60
        server.send(request)
        while not isinstance(answer := server.receive(until), RunOutcome):
            if answer == FINISHED:
                finished()
            else:
                server.ranks = answer
        server.ranks = []
        return answer

    def end(self) -> None:
        """Another rank of the cell failed elsewhere: the ranks here have `grace` seconds more. From any thread."""
        self._tell(END)

    def leave(self) -> None:
        """All ranks of the cell have finished, here and elsewhere: let those here go. From any thread."""
        self._tell(LEAVE)

    def _tell(self, word: str) -> None:
        if server := self._server:
            with contextlib.suppress(OSError, TypeError):  # it died, and is being closed: `fork` says so
                server.channel.send(word)

    def abort(self) -> None:
        """End the server and its ranks: a `start` or `run` under way fails. From any thread; `close` is still due."""
        if server := self._server:
            # While it imports, it does not handle the signal by which it would end its ranks.
            server.process.send_signal(signal.SIGINT if self.facts else signal.SIGKILL)

    def close(self) -> None:
        """End the fork server and all ranks, and wait until they are gone. Safe at any time, more than once."""
        if server := self._server:
            server.close()
            self._server = None
