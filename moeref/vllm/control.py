"""The commands of an engine, wherever it runs: in this process, behind a pipe, or behind vLLM's HTTP server.

A `Control` calls a command by the name of its route on the server.
"""

from __future__ import annotations

import json
import pickle
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

PauseMode = Literal["abort", "wait", "keep"]


class Control(Protocol):
    """Calls a command: pause, resume, init_weight_transfer_engine, start_weight_update, update_weights,
    finish_weight_update, update_weight_version, weight_info, reset_prefix_cache or collective_rpc."""

    def call(self, name: str, **arguments: Any) -> Any:
        """Run a command; return its value. Raises what the engine raises, or RuntimeError with the text of that."""


class InProcess:
    """The commands of an `LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine
        versioned = llm if hasattr(llm, "update_weight_version") else _Versioned(llm)
        self._commands: dict[str, Callable[..., Any]] = {
            "pause": lambda mode="abort": llm.sleep(level=0, mode=mode),
            "resume": lambda: llm.wake_up(tags=["scheduling"]),
            "init_weight_transfer_engine": lambda **request: llm.init_weight_transfer_engine(request),
            "start_weight_update": llm.start_weight_update,
            "update_weights": lambda **request: llm.update_weights(request),
            "finish_weight_update": versioned.finish_weight_update,
            "update_weight_version": versioned.update_weight_version,
            "weight_info": versioned.get_weight_version,
            "reset_prefix_cache": lambda reset_running_requests=False, reset_external=False: llm.reset_prefix_cache(
                reset_running_requests, reset_connector=reset_external
            ),
            "collective_rpc": lambda method, args=(): core.collective_rpc(method, args=tuple(args)),
        }

    def call(self, name: str, **arguments: Any) -> Any:
        return self._commands[name](**arguments)


class _Versioned:
    """Keeps the version of an `LLM` of vLLM before 0.30, which has none. The workers' own is in `moeref_state`."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._version = llm, "default"

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update()
        self._version = weight_version or self._version

    def update_weight_version(self, new_version: str) -> None:
        self._version = new_version

    def get_weight_version(self) -> str:
        return self._version


class Piped:
    """The commands of an engine in another process, which runs `serve` at the other end of the connection."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def call(self, name: str, **arguments: Any) -> Any:
        # Not `send`: it can crash CPython 3.12.1 when the peer is dead.
        self._connection.send_bytes(pickle.dumps((name, arguments)))
        value, error = self._connection.recv()
        if error is not None:
            raise error
        return value


def serve(control: Control, connection: Connection[Any, Any]) -> Any:
    """Answer the calls of `Piped` until it sends None with a value, which is returned."""
    while True:
        name, arguments = connection.recv()
        if name is None:
            return arguments
        try:
            answer = pickle.dumps((control.call(name, **arguments), None))
        except Exception as error:  # the caller gets it, and where it was raised
            error.add_note(traceback.format_exc())
            answer = pickle.dumps((None, error))
        connection.send_bytes(answer)


#: Commands whose arguments are in the URL's query; and, for commands with a value, its key in the answer.
_QUERY = frozenset({"pause", "reset_prefix_cache"})
_VALUE = {"weight_info": "weight_version", "reset_prefix_cache": "success", "collective_rpc": "results"}


class Served:
    """The commands of vLLM's server at `url`, 0.30 or later, started with VLLM_SERVER_DEV_MODE=1, which adds them.

    A call raises RuntimeError with the server's text if it fails there or answers without its value; OSError for a
    server that is not reached within `seconds`.
    """

    def __init__(self, url: str, seconds: float = 120.0) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds

    def call(self, name: str, **arguments: Any) -> Any:
        method = "GET" if name == "weight_info" else "POST"
        query = "?" + "&".join(f"{k}={v}" for k, v in arguments.items()) if name in _QUERY and arguments else ""
        body = None if name in _QUERY or not arguments else json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json"} if body else {}
        url = f"{self._url}/{name}{query}"
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            reply = error.read().decode(errors="replace")
            raise RuntimeError(f"{url}: {error.code} {error.reason}: {reply[:2000]}") from error
        if name not in _VALUE:
            return None
        answer = json.loads(text) if text else {}
        if _VALUE[name] not in answer:
            raise RuntimeError(f"{url}: the answer has no {_VALUE[name]}: {text[:200]!r}")
        return answer[_VALUE[name]]
