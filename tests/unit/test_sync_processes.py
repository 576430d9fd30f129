"""A weight update between two processes, one of which is killed or stopped on the way."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from engines import weights

from docs.examples.small_engine import SmallEngine
from moeref.sync import Bucket, EngineDead, Refused, State, SyncError, Timeouts, WeightSync

SMALL = {"bucket_bytes": 300}
#: Imports torch once for all processes.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["moeref.sync"])


class Remote:
    """A small engine at the other end of a connection. `stop` sends a signal to it before the nth call of a name."""

    drafts, caches = False, frozenset({"prefix"})

    def __init__(self, connection: Any, pid: int = 0, stop: tuple[str, int, int] | None = None) -> None:
        self.connection, self.pid, self.stop, self.calls = connection, pid, stop, list[str]()

    def call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if self.stop is not None and (name, self.calls.count(name)) == self.stop[:2]:
            os.kill(self.pid, self.stop[2])
        # Not `send`: in CPython 3.12.1, its traceback crashes the collector of garbage (a BytesIO with a view of it).
        self.connection.send_bytes(pickle.dumps((name, arguments)))
        value, error = pickle.loads(self.connection.recv_bytes())
        if error is not None:
            raise error
        return value

    def __getattr__(self, name: str) -> Any:
        if name not in ("version", "receipt", "pause", "begin", "commit", "reset_caches", "resume"):
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def send(self, bucket: Bucket) -> Any:
        plain = [(name, tensor.numpy()) for name, tensor in bucket.tensors]
        return self.call("send", bucket.index, plain, bucket.last, bucket.checksum)


def serve(engine: SmallEngine, connection: Connection) -> None:
    """Answer calls until the other end is gone."""
    with suppress(EOFError, ConnectionError):
        while True:
            name, arguments = pickle.loads(connection.recv_bytes())
            if name == "send":
                index, plain, last, checksum = arguments
                tensors = tuple((of, torch.from_numpy(values.copy())) for of, values in plain)
                arguments = (Bucket(index, tensors, last, checksum),)
            try:
                answer = (getattr(engine, name)(*arguments), None)
            except SyncError as error:
                answer = (None, error)
            connection.send_bytes(pickle.dumps(answer))


def engine_process(connection: Connection) -> None:
    serve(SmallEngine(weights(0)), connection)


def sender_process(connection: Connection) -> None:
    """Updates the engine, and dies after the first bucket was sent."""

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1).items()
        yield "model.norm.weight", torch.ones(99)
        os.kill(os.getpid(), signal.SIGKILL)

    WeightSync(Remote(connection), **SMALL).update(source(), 1)


@contextmanager
def process(target: Any) -> Iterator[tuple[Any, Any]]:
    """(its process, this end of a connection to it)."""
    here, there = SERVER.Pipe()
    child = SERVER.Process(target=target, args=(there,), daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join(10)


def test_an_engine_in_another_process_takes_an_update() -> None:
    with process(engine_process) as (_, connection):
        remote = Remote(connection)
        sync = WeightSync(remote, **SMALL)
        assert sync.update(weights(1).items(), 1).receipt.buckets == 2
        assert (remote.version(), sync.state) == (1, State.SERVING)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("at", [("pause", 1), ("send", 2), ("commit", 1), ("resume", 1)], ids=lambda at: at[0])
def test_an_engine_that_goes_away_is_declared_dead(at: tuple[str, int], number: int) -> None:
    with process(engine_process) as (child, connection):
        remote = Remote(connection, child.pid, (*at, number))
        assert remote.version() == 0
        limit = {"query": 1, at[0]: 1} if number == signal.SIGSTOP else {}
        sync = WeightSync(remote, timeouts=Timeouts(**limit), **SMALL)
        begun = time.monotonic()
        with pytest.raises(EngineDead):
            sync.update(weights(1).items(), 1)
        assert time.monotonic() - begun < 30
        assert sync.state is State.DEAD
        assert (f"{at[0]} did not return within 1 s" in sync.reason) == (number == signal.SIGSTOP)


def test_a_sender_that_is_killed_leaves_an_engine_that_does_not_serve_its_half() -> None:
    engine = SmallEngine(weights(0))
    with process(sender_process) as (child, connection):
        serve(engine, connection)
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    assert engine.intake.received.buckets == 1
    assert engine.version() == 0
    with pytest.raises(SyncError, match="the update to version 1 is not finished"):
        engine.resume()
    with pytest.raises(Refused, match="paused the engine already"):
        WeightSync(engine, **SMALL).update(weights(2).items(), 2)
    with pytest.raises(RuntimeError, match="the engine is paused"):
        engine.logprobs((1,))
