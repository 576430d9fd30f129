"""Buckets through shared memory, with a second process that is killed at each of its steps."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import resource_tracker
from multiprocessing.context import ForkProcess
from typing import Any, cast

import pytest
import torch

from moeref.exporter import Bucket, BucketError, SharedBuffer, buckets

pytestmark = pytest.mark.cpu

FORK = multiprocessing.get_context("fork")  # a fresh interpreter would import torch for seconds


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def spoil(shared: SharedBuffer, at: str) -> None:
    """This process is killed before step `at` of the next bucket, or in the middle of its bytes."""
    room, written = cast("Any", shared), shared._write_record

    def torn(half: int, message: torch.Tensor) -> None:
        shared._half(half)[: message.numel() // 2].copy_(message[: message.numel() // 2])
        die()

    match at:
        case "begin":
            die()
        case "bytes":
            room._fill = die
        case "middle":
            room._fill = torn
        case "record":
            room._write_record = lambda which, n, nbytes: die() if n == 3 else written(which, n, nbytes)


def exchange(name: str, role: str, at: str) -> None:
    """The other process: `role` is put or take; it is killed at bucket 3."""
    tracker = cast("Any", resource_tracker)._resource_tracker
    tracker._fd = tracker._pid = None  # as any process that does not descend from the first, it has its own
    shared = SharedBuffer(name=name, timeout=20)
    for number in (1, 2, 3, 4):
        if number == 3:
            spoil(shared, at)
        if role == "put":
            shared.put(of(float(number)), 7)
        else:
            (taken,) = shared.take(7).tensors()
            assert torch.equal(taken[1], torch.full((1000,), float(number)))
    shared.close()


def of(value: float) -> Bucket:
    (bucket,) = buckets([("a", torch.full((1000,), value))], 1 << 16)
    return bucket


def other(shared: SharedBuffer, role: str, at: str) -> ForkProcess:
    process = FORK.Process(target=exchange, args=(shared.name, role, at))
    process.start()
    return process


def code(process: ForkProcess) -> int | None:
    """The exit code, or the signal's number below zero."""
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize(("at", "whole"), [("begin", 2), ("bytes", 2), ("middle", 2), ("record", 2), ("never", 4)])
def test_a_reader_has_whole_buckets_whenever_the_writer_dies(at: str, whole: int) -> None:
    with SharedBuffer(1 << 16, timeout=60) as shared:
        writer = other(shared, "put", at)
        for number in range(1, whole + 1):
            ((name, tensor),) = shared.take(7).tensors()
            assert name == "a"
            assert torch.equal(tensor, torch.full((1000,), float(number)))
        assert code(writer) == (0 if at == "never" else -signal.SIGKILL)
        shared._timeout = 0.2
        with pytest.raises(BucketError, match=rf"waited 0.2 s until bucket {whole + 1} is written; is the other proc"):
            shared.take(7)


@pytest.mark.parametrize("at", ["begin", "record", "never"])
def test_a_writer_is_told_when_the_reader_is_gone(at: str) -> None:
    with SharedBuffer(1 << 16, timeout=60) as shared:
        reader = other(shared, "take", at)
        for number in range(1, 5):
            shared.put(of(float(number)), 7)
        assert code(reader) == (0 if at == "never" else -signal.SIGKILL)
        shared._timeout = 0.2
        if at == "never":
            shared.put(of(5.0), 7)
        else:
            with pytest.raises(BucketError, match="until bucket 3 is acknowledged; is the other process gone"):
                shared.put(of(5.0), 7)


def test_changed_bytes_and_other_generations_are_refused() -> None:
    with SharedBuffer(1 << 16) as shared:
        reader = SharedBuffer(name=shared.name)
        shared.put(of(1.0), 7)
        with pytest.raises(BucketError, match="generation 7, expected 8: a stale read"):
            reader.take(8)
        shared._half(1)[100] ^= 1
        with pytest.raises(BucketError, match="a torn read"):
            reader.take(7)
        shared._half(1)[100] ^= 1
        assert reader.take(7).nbytes == 4000
        reader.close()


def test_a_bucket_that_is_too_large_is_refused_before_a_byte_is_written() -> None:
    with SharedBuffer(4_000) as shared:
        before = bytes(shared._memory.buf)
        with pytest.raises(BucketError, match=r"bucket 0 has \d+ bytes, a half \d+: nothing written"):
            shared.put(of(1.0), 7)
        assert bytes(shared._memory.buf) == before


def test_memory_that_is_closed_can_be_closed_again() -> None:
    with SharedBuffer(4_000) as shared:
        shared.close()
