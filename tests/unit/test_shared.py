"""Buckets through shared memory, with a second process that is killed at each of its steps."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from moeref.exporter import Bucket, BucketError, SharedBuffer, buckets

pytestmark = pytest.mark.cpu

#: The other process: `role` is put or take; it is killed before step `at` of bucket 3, or in the middle of its bytes.
OTHER = """
import os, signal, sys
import torch
from moeref.exporter import buckets
from moeref.exporter.shared import SharedBuffer

name, role, at = sys.argv[1], sys.argv[2], sys.argv[3]
shared = SharedBuffer(name=name, timeout=20)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def torn(half, message):
    shared._half(half)[: message.numel() // 2].copy_(message[: message.numel() // 2])
    die()

def unread(number, written):
    def record(which, n, nbytes):
        return die() if n == number else written(which, n, nbytes)
    return record

for number in (1, 2, 3, 4):
    if number == 3:
        if at == "begin":
            die()
        elif at == "bytes":
            shared._fill = die
        elif at == "middle":
            shared._fill = torn
        elif at == "record":
            shared._write_record = unread(3, shared._write_record)
    if role == "put":
        (bucket,) = buckets([("a", torch.full((1000,), float(number)))], 1 << 16)
        shared.put(bucket, 7)
    else:
        (taken,) = shared.take(7).tensors()
        assert torch.equal(taken[1], torch.full((1000,), float(number)))
shared.close()
"""


def of(value: float) -> Bucket:
    (bucket,) = buckets([("a", torch.full((1000,), value))], 1 << 16)
    return bucket


def other(shared: SharedBuffer, role: str, at: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", OTHER, shared.name, role, at])


@pytest.mark.parametrize(("at", "whole"), [("begin", 2), ("bytes", 2), ("middle", 2), ("record", 2), ("never", 4)])
def test_a_reader_has_whole_buckets_whenever_the_writer_dies(at: str, whole: int) -> None:
    with SharedBuffer(1 << 16, timeout=60) as shared:
        writer = other(shared, "put", at)
        for number in range(1, whole + 1):
            ((name, tensor),) = shared.take(7).tensors()
            assert name == "a"
            assert torch.equal(tensor, torch.full((1000,), float(number)))
        assert writer.wait(60) == (0 if at == "never" else -signal.SIGKILL)
        shared._timeout = 0.2
        with pytest.raises(BucketError, match=rf"waited 0.2 s until bucket {whole + 1} is written; the other is gone"):
            shared.take(7)


@pytest.mark.parametrize("at", ["begin", "record", "never"])
def test_a_writer_is_told_when_the_reader_is_gone(at: str) -> None:
    with SharedBuffer(1 << 16, timeout=60) as shared:
        reader = other(shared, "take", at)
        for number in range(1, 5):
            shared.put(of(float(number)), 7)
        assert reader.wait(60) == (0 if at == "never" else -signal.SIGKILL)
        shared._timeout = 0.2
        if at == "never":
            shared.put(of(5.0), 7)
        else:
            with pytest.raises(BucketError, match="until bucket 3 is acknowledged; the other is gone"):
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
