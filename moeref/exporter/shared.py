"""Buckets for another process of the same host, through shared memory: one half is read while the other is written.

Each half has a record: which bucket is in it, of how many bytes. A writer takes the record away before it changes the
bytes and gives it back after, and waits until the reader has acknowledged what was there. The message in the half has a
checksum and the generation of its weights. So whichever process is killed at whatever step, a reader has a whole bucket
or an error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import cast

import torch
import xxhash

from moeref.exporter.buckets import Bucket, read
from moeref.exporter.cuts import BucketError

_HALVES = 2
#: A record is the number of a bucket, its bytes and the XXH3 of both. There is one a half, and one more for what the
#: reader has acknowledged last.
_RECORD = 24
_HEADER = 128
_PAUSE = 0.0005


class SharedBuffer:
    """Memory of `nbytes` for each half. One process makes it and gives its `name`, the other one attaches to it.

    Either may `put` while the other `take`s. A context manager: the maker removes the memory at its end.
    """

    def __init__(self, nbytes: int = 0, *, name: str | None = None, timeout: float = 60.0) -> None:
        """With a `name`: attach to that memory; else make it. `timeout`: seconds to wait for the other process."""
        self._made = name is None
        self._memory = SharedMemory(create=True, size=_HEADER + _HALVES * nbytes) if name is None else _attached(name)
        self._timeout, self._done = timeout, 0
        self.name = self._memory.name
        self._raw = cast("memoryview", self._memory.buf)
        self._bytes = torch.frombuffer(self._raw, dtype=torch.uint8)
        self._size = (self._bytes.numel() - _HEADER) // _HALVES

    def put(self, bucket: Bucket, generation: int) -> None:
        """Write a bucket. Raises BucketError if it is too large, before a byte is written, or if no half gets free."""
        message = bucket.message(generation)
        if message.numel() > self._size:
            raise BucketError(
                f"bucket {bucket.number} has {message.numel()} bytes, a half {self._size}: nothing written"
            )
        number = self._done + 1
        self._wait(lambda: self._record(_HALVES)[0] >= number - _HALVES, f"bucket {number - _HALVES} is acknowledged")
        half = number % _HALVES
        self._write_record(half, 0, 0)
        self._fill(half, message)
        self._write_record(half, number, message.numel())
        self._done = number

    def _fill(self, half: int, message: torch.Tensor) -> None:
        """Copy the bytes of a message, which may be on a GPU, and wait once."""
        self._half(half)[: message.numel()].copy_(message, non_blocking=True)
        if message.is_cuda:
            torch.cuda.current_stream(message.device).synchronize()

    def take(self, generation: int) -> Bucket:
        """The next bucket, in memory of its own. Raises BucketError if none comes, or one that is torn or stale."""
        number = self._done + 1
        half = number % _HALVES
        self._wait(lambda: self._record(half)[0] >= number, f"bucket {number} is written")
        written, nbytes = self._record(half)
        if written != number or nbytes > self._size:
            raise BucketError(f"bucket {written} is where bucket {number} is expected: another process writes here")
        bucket = read(self._half(half)[:nbytes].clone(), generation)
        self._write_record(_HALVES, number, 0)
        self._done = number
        return bucket

    def _half(self, half: int) -> torch.Tensor:
        start = _HEADER + half * self._size
        return self._bytes[start : start + self._size]

    def _record(self, which: int) -> tuple[int, int]:
        """(number, bytes) of a half, or the acknowledgement; (0, 0) while it is written."""
        raw = bytes(self._raw[which * _RECORD : (which + 1) * _RECORD])
        if xxhash.xxh3_64_digest(raw[:16]) != raw[16:]:
            return 0, 0
        return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")

    def _write_record(self, which: int, number: int, nbytes: int) -> None:
        raw = number.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
        self._raw[which * _RECORD : (which + 1) * _RECORD] = raw + xxhash.xxh3_64_digest(raw)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._timeout
        while not ready():
            if time.monotonic() > end:
                raise BucketError(
                    f"shared memory {self.name}: waited {self._timeout} s until {what}; is the other process gone?"
                )
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Unmap the memory; its maker removes it. Does nothing the second time."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._memory.close()
        made, self._made = self._made, False
        if made:
            self._memory.unlink()

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _attached(name: str) -> SharedMemory:
    """Attach to the memory without Python's tracker, which would remove the memory when this process ends."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    memory = SharedMemory(name)
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
    return memory
