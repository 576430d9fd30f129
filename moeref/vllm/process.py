"""An engine in a process of its own, for a trainer's process that imports no vllm and may lose its engine.

A keeper imports vllm once and forks one engine at a time, so that a dead one is replaced in a second. Keeper and engine
end when the trainer's process is gone, since their connection is.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from moeref.families import Model
from moeref.vllm.arguments import EngineError, installed, prepare
from moeref.vllm.control import InProcess, Piped, serve
from moeref.vllm.rollout import Sample, from_outputs

#: After this many steps in a row without a sampled token, `advance` waits no longer.
IDLE = 100


class EngineLost(EngineError):
    """The process of an engine ended without being told to."""


class Process(Piped):
    """The control of an engine in a process of its own. `pid` is the engine's, None while there is no engine.

    Besides the commands of a control it has `submit`, `advance` and `collect`, see `Stepped`.
    """

    def __init__(self) -> None:
        installed()
        self._mine, theirs = Pipe()
        super().__init__(self._mine)
        code = f"from moeref.vllm.process import keep; keep({theirs.fileno()})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109
        self._keeper = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.pid: int | None = None
        self._lost: EngineLost | None = None

    def call(self, name: str, **arguments: Any) -> Any:
        """As `Control.call`. Raises EngineLost at once if the engine has died."""
        if self._lost:
            raise self._lost
        try:
            return super().call(name, **arguments)
        except EngineLost as error:
            self._lost = error
            raise

    def start(self, arguments: Mapping[str, Any]) -> None:
        """Start an engine with arguments of `vllm.LLM`, in place of one that has ended. Raises what vLLM raises."""
        self.stop()
        self.pid = self.call("start", **arguments)

    def stop(self) -> None:
        """End the engine, if there is one. Its answers to earlier calls are dropped."""
        if self.pid is not None:
            self._mine.send_bytes(pickle.dumps((None, None)))
            while self._mine.recv() != ENDED:
                pass
            self.pid, self._lost = None, None

    def close(self) -> None:
        """End the engine and its keeper."""
        self._mine.close()
        self._keeper.wait()


#: What the keeper sends when an engine has ended as it was told to.
ENDED = "ended"
#: The exit code of an engine that could not start, and has said why.
REFUSED = 3


def keep(fd: int) -> None:
    """Run the keeper: it forks an engine at each `start`, and sends EngineLost for one that died."""
    prepare()
    from vllm import LLM  # noqa: F401 - so that engines need not import it

    connection: Connection[Any, Any] = Connection(fd)
    try:
        while True:
            name, arguments = connection.recv()
            if name is None:
                connection.send(ENDED)
            if name != "start":
                continue  # asked of an engine that has died
            if not (pid := os.fork()):
                _engine(connection, arguments)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code == 0:
                connection.send(ENDED)
            elif code != REFUSED:
                died = EngineLost(f"the engine's process {pid} ended with {code} (a negative number is a signal)")
                connection.send_bytes(pickle.dumps((None, died)))
    except (EOFError, OSError):
        pass  # the trainer's process is gone


def _engine(connection: Connection[Any, Any], arguments: Mapping[str, Any]) -> None:
    """Run the forked engine, and exit: this never returns into the keeper."""
    code = 1
    try:
        from vllm import LLM

        try:
            llm = LLM(**arguments)
        except Exception as error:
            connection.send_bytes(pickle.dumps((None, EngineError(f"{type(error).__name__}: {error}"))))
            os._exit(REFUSED)
        connection.send_bytes(pickle.dumps((os.getpid(), None)))
        serve(Stepped(llm), connection)
        code = 0
    except (EOFError, OSError):
        pass  # the trainer's process is gone: the keeper sees the same, and ends
    finally:
        os._exit(code)


class Stepped(InProcess):
    """An `LLM` of this process that goes on only when told to, so that requests can be under way in an update."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._core, self._count = llm.llm_engine, itertools.count()
        self._outputs: dict[str, Any] = {}  # of each request the last one, which has all of its tokens
        self._commands |= {"submit": self.submit, "advance": self.advance, "collect": self.collect}

    def submit(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> None:
        """Add a request for each prompt, and drop earlier requests; `sampling` are arguments of SamplingParams."""
        from vllm import SamplingParams

        self._abort()
        self._outputs = {}
        for prompt in prompts:
            name = f"stepped-{next(self._count)}"
            self._core.add_request(name, {"prompt_token_ids": list(prompt)}, SamplingParams(**sampling))
            self._outputs[name] = None

    def advance(self, tokens: int | None = None) -> None:
        """Go on until every request has this many tokens, or has ended. Raises EngineError if no token comes."""
        idle, enough = 0, math.inf if tokens is None else tokens
        while any(not self._ended(name) and self._made(name) < enough for name in self._outputs):
            before = sum(map(self._made, self._outputs))
            for output in self._core.step():
                self._outputs[output.request_id] = output
            idle = 0 if sum(map(self._made, self._outputs)) > before else idle + 1
            if idle > IDLE:
                raise EngineError(f"{idle} steps sampled no token: is the engine paused?")

    def collect(self, model: Model, *, routes: bool = True) -> list[Sample]:
        """The samples of all requests so far. Requests that have not ended are aborted; vLLM has no routes of them.

        Raises EngineError for a request without a token, or for routes that are asked for and absent.
        """
        if bare := [name for name in self._outputs if not self._made(name)]:
            raise EngineError(f"{len(bare)} requests have no token yet: advance first")
        self._abort()
        cut = [not self._ended(name) for name in self._outputs]
        samples = [one for output in self._outputs.values() for one in from_outputs(self, output, model, routes=routes)]
        self._outputs = {}
        return [replace(one, reason="abort") if aborted else one for one, aborted in zip(samples, cut, strict=True)]

    def _abort(self) -> None:
        self._core.abort_request([name for name in self._outputs if not self._ended(name)])

    def _made(self, name: str) -> int:
        output = self._outputs[name]
        return len(output.outputs[0].token_ids) if output else 0

    def _ended(self, name: str) -> bool:
        output = self._outputs[name]
        return output is not None and output.outputs[0].finish_reason is not None
