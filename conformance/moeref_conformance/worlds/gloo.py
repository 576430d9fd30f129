"""The parent's side of a world of forked ranks: starts the zygote, sends it cells, and outlives whatever happens to it.

A failure of the target shows in the exits of a RunOutcome. `RunOutcome.error` is for failures of the kit: the zygote
did not start (the target could not be imported, say) or died. After a death the next `run` starts a new one.
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
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moeref_conformance.api import Cell, Claims, to_plain
from moeref_conformance.worlds import RankExit, RunOutcome, signal_name

ENTRY = "moeref_conformance.probe:run_rank"
START_SECONDS = 300.0  # imports of torch, megatron-core and the target on a slow, shared machine
LEAVE_SECONDS = 10.0
LOG_TAIL = 4000  # characters


class WorldError(RuntimeError):
    """The zygote could not be started, or died."""


class GlooWorld:
    """Runs cells with one process a rank over gloo, on the CPU unless `device` says otherwise ("cuda:0").

    `target_spec` is a target's name or `module:attr`, resolved in the zygote, never here. A cell may take `deadline`
    seconds; when a rank has failed, the others have `grace` seconds more. `entry` is what each rank calls. Use it as a
    context manager, and start it from a thread that lives as long as it does.
    """

    def __init__(
        self,
        target_spec: str,
        *,
        deadline: float = 120.0,
        grace: float = 3.0,
        entry: str = ENTRY,
        device: str = "cpu",
    ) -> None:
        if deadline <= 0 or grace < 0:
            raise ValueError(f"deadline {deadline} must be positive and grace {grace} not negative")
        self.target_spec, self.entry, self.device = target_spec, entry, device
        self.deadline, self.grace = deadline, grace
        #: What the zygote said when it was ready: versions, seconds of the imports, the target's info and claims.
        self.facts: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._pending = b""
        self._ranks: list[int] = []
        self._refused = ""  # why the target cannot be served: importing it again would not help

    def __enter__(self) -> GlooWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Start the zygote unless it is running, and answer its facts. Raises WorldError with the reason it gave."""
        if self._process is not None and self._process.poll() is None:
            return self.facts
        if self._refused:
            raise WorldError(self._refused)
        self.close()
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # As multiprocessing does: what can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "moeref_conformance.worlds.zygote", "--fd", str(theirs.fileno())]
        command += ["--parent", str(os.getpid()), "--target", self.target_spec, "--entry", self.entry]
        self._process = subprocess.Popen(
            [*command, "--device", self.device],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches the parent only, which then ends the zygote in order
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

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell; records go to `<cell_dir>/rank0003/`. `inputs` needs at least "hf_config" (a folder).

        Raises ValueError, before anything is started, for a cell that `claims` does not cover, for inputs without
        "hf_config", and for a folder that holds records already.
        """
        cell_dir = cell_dir.resolve()
        reason = claims.why_not(cell)
        if reason is not None:
            raise ValueError(f"cell {cell.id} must not be run: {reason}")
        if "hf_config" not in inputs:
            raise ValueError(f"cell {cell.id}: inputs {sorted(inputs)} lack 'hf_config'")
        if any(cell_dir.glob("rank[0-9]*")):
            raise ValueError(f"cell {cell.id}: {cell_dir} holds the records of an earlier run")
        begin = time.monotonic()
        request = {
            "cell": to_plain(cell),
            "cell_dir": str(cell_dir),
            "inputs": inputs,
            "deadline": self.deadline,
            "grace": self.grace,
        }
        try:
            self.start()
            answer = self._ask(request)
        except WorldError as error:
            return RunOutcome((), time.monotonic() - begin, error=str(error))
        if "error" in answer:
            return RunOutcome((), time.monotonic() - begin, error=f"{answer['error']}\n{answer['traceback']}")
        exits = tuple(RankExit(**e) for e in answer["exits"])
        return RunOutcome(exits, answer["seconds"], strays=answer["strays"])

    def close(self) -> None:
        """End the zygote and every rank, and return when they are gone. Safe to call at any time, more than once."""
        if self._channel is not None:
            self._channel.close()  # the zygote takes end of file as its order to end everything
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

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._channel is not None
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            until = time.monotonic() + self.deadline + self.grace + 60
            answer = self._receive(until)
            while "forked" in answer:
                self._ranks = answer["forked"]
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
                raise WorldError(f"the zygote gave no answer in time\n{self._tail()}") from None
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
            return f"the zygote closed its connection\n{self._tail()}"
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        return f"the zygote died: {how}\n{self._tail()}"

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def _end_ranks(self) -> None:
        """Process groups of ranks whose zygote died: the ranks die with it, what they had started may not."""
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._ranks = []
