"""Shards on their way from their owners to the writer, at most a bucket at a time.

The writer asks an owner for each of its messages with one byte, and so gets no more than it has room for. It asks for
the next batch before it reads the one that is there. An owner that has failed sends a message of state FAILED, and a
writer that has failed asks with STOP: neither waits for a rank that will not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from moeref.bridge.shard_map import GlobalParam
from moeref.dtypes import DTYPES
from moeref.exporter.batches import Batch, Message
from moeref.exporter.messages import FAILED, GO, GOOD, STOP, Buffers, Peer
from moeref.torch_dtypes import TORCH

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Stopped(Exception):
    """Another rank has failed, so that no more shards are sent."""


class Source(NamedTuple):
    """A shard: contiguous in `memory` from element `offset` of its storage on."""

    memory: torch.Tensor
    offset: int


class Transfer(Protocol):
    """A rank's part in the messages of an export."""

    def begin(self, batch: Batch) -> None:
        """Send or receive the shards of `batch`. Batches begin in the order of the plan on all ranks."""

    def end(self) -> None:
        """Wait until all messages have gone."""

    def abort(self) -> None:
        """After a failure: end what has begun, and let no rank wait for the rest."""


class Owner:
    """A rank that is not the writer. It sends its shards, if it has any."""

    def __init__(self, peer: Peer, held: Mapping[str, torch.Tensor]) -> None:
        self._peer, self._held = peer, held
        messages = (m for batch in peer.plan.batches for m in batch.messages)
        self._unsent = deque(message for message in messages if message.owner == peer.rank)
        self._buffers = Buffers(peer, [message.nbytes for message in self._unsent])
        self._going: deque[tuple[Message, torch.Tensor, dist.Work]] = deque()

    def begin(self, batch: Batch) -> None:
        for message in batch.messages:
            if message.owner == self._peer.rank:
                self._send(message)

    def _send(self, message: Message) -> None:
        size = self._buffers.size(message.nbytes)
        while self._going and size + self._bytes_going() > self._peer.plan.bucket_bytes:
            self._finish()
        with self._peer.naming(message):
            buffer = self._packed(message)
            if not self._asked():
                raise Stopped
            self._unsent.popleft()
            self._going.append((message, buffer, self._peer.send(buffer[: message.nbytes], self._peer.plan.writer)))

    def _bytes_going(self) -> int:
        return sum(buffer.numel() for _, buffer, _ in self._going)

    def _packed(self, message: Message) -> torch.Tensor:
        buffer = self._buffers.take(message.nbytes)
        buffer[0] = GOOD
        for sent in message.shards:
            shard = self._held[self._peer.plan.params[sent.param][1].name]
            place = buffer[sent.offset : sent.offset + shard.nbytes]
            place.view(shard.dtype).view(shard.shape).copy_(shard.detach())
        return buffer

    def _asked(self) -> bool:
        """Whether the writer wants the next message; waits until it says so. After STOP nothing is left to send."""
        asked = self._peer.state(STOP)
        self._peer.receive(asked, self._peer.plan.writer).wait()
        if int(asked) != GO:
            self._unsent.clear()
        return bool(self._unsent)

    def _finish(self) -> None:
        message, buffer, work = self._going.popleft()
        with self._peer.naming(message):
            work.wait()
        self._buffers.give(buffer)

    def end(self) -> None:
        while self._going:
            self._finish()

    def abort(self) -> None:
        self.end()
        while self._unsent and self._asked():
            buffer = self._peer.bytes(self._unsent.popleft().nbytes)
            buffer[0] = FAILED
            self._peer.send(buffer, self._peer.plan.writer).wait()


class _Arrival:
    """A batch that was asked for: its messages, one after the other in one buffer."""

    def __init__(self, peer: Peer, batch: Batch, buffer: torch.Tensor) -> None:
        self.batch, self.buffer, self._peer = batch, buffer, peer
        self._asking: list[dist.Work] = []
        self._coming: deque[tuple[Message, int, dist.Work]] = deque()
        at = 0
        for message in batch.messages:
            with peer.naming(message):
                # Not waited for here: the owner may be at an earlier tensor, where it waits for this rank.
                self._asking.append(peer.send(peer.state(GO), message.owner))
                work = peer.receive(buffer[at : at + message.nbytes], message.owner)
                self._coming.append((message, at, work))
            at += message.nbytes

    def wait(self) -> None:
        """Wait for all messages. Raises Stopped if an owner has failed."""
        while self._coming:
            message, at, work = self._coming.popleft()
            with self._peer.naming(message):
                work.wait()
            if int(self.buffer[at]) != GOOD:
                raise Stopped
        for work in self._asking:
            work.wait()

    def drop(self) -> None:
        """Let the messages come that are on their way, whatever is in them."""
        while self._coming:
            with suppress(RuntimeError):
                self._coming.popleft()[2].wait()

    def sources(self) -> dict[tuple[int, int], Source]:
        """Every shard by (number of its parameter, part)."""
        params = self._peer.plan.params
        typed = {name: self.buffer[: self.batch.nbytes].view(dtype) for name, dtype in TORCH.items()}
        found, at = {}, 0
        for message in self.batch.messages:
            for number, part, offset in message.shards:
                dtype = params[number][1].dtype
                found[number, part] = Source(typed[dtype], (at + offset) // DTYPES[dtype].bytes)
            at += message.nbytes
        return found


class Writer:
    """The rank that all shards go to."""

    def __init__(self, peer: Peer, held: Mapping[str, torch.Tensor]) -> None:
        self._peer, self._held = peer, held
        self._unasked = deque(batch for batch in peer.plan.batches if batch.messages)
        self._buffers = Buffers(peer, [batch.nbytes for batch in self._unasked])
        self._asked: deque[_Arrival] = deque()
        self._met: set[int] = set()
        self._here: _Arrival | None = None
        self._sources: dict[tuple[int, int], Source] = {}

    def begin(self, batch: Batch) -> None:
        self.end()
        if not batch.messages:
            return
        if not self._asked:
            self._ask()
        self._here = self._asked[0]
        if self._unasked and self._fits(self._unasked[0]):
            self._ask()
        self._here.wait()
        self._asked.popleft()
        self._sources = self._here.sources()

    def _fits(self, batch: Batch) -> bool:
        """Whether the bucket has room for `batch` next to the one that is here."""
        here = self._here.buffer.numel() if self._here else 0
        # With NCCL the first message between two ranks waits for both: not for one that is at an earlier tensor.
        is_met = all(message.owner in self._met for message in batch.messages)
        return is_met and here + self._buffers.size(batch.nbytes) <= self._peer.plan.bucket_bytes

    def _ask(self) -> None:
        batch = self._unasked.popleft()
        self._met.update(message.owner for message in batch.messages)
        self._asked.append(_Arrival(self._peer, batch, self._buffers.take(batch.nbytes)))

    def source(self, number: int, part: int, param: GlobalParam) -> Source:
        """A shard of the batch that has begun. The writer's own is not copied."""
        arrived = self._sources.get((number, part))
        if arrived:
            return arrived
        own = self._held[param.name].detach().contiguous()
        return Source(own, int(own.storage_offset()))

    def address(self, number: int, part: int) -> int:
        """Where the shard lies in the memory of this host, contiguous; 0 if it does not."""
        arrived = self._sources.get((number, part))
        if arrived:
            memory, offset = arrived
            return memory.data_ptr() + offset * memory.itemsize if memory.device.type == "cpu" else 0
        own = self._held[self._peer.plan.params[number][1].name]
        # A tensor of another class may keep its elements elsewhere; one without storage has address 0.
        is_plain = type(own) in _PLAIN and own.is_cpu and own.is_contiguous()
        return own.data_ptr() if is_plain else 0

    def end(self) -> None:
        self._sources = {}
        if self._here:
            self._buffers.give(self._here.buffer)
            self._here = None

    def abort(self) -> None:
        self._sources, self._here = {}, None
        while self._asked:
            self._asked.popleft().drop()
        owners = {message.owner for batch in self._unasked for message in batch.messages}
        stops = [self._peer.send(self._peer.state(STOP), owner) for owner in sorted(owners)]
        for stop in stops:
            stop.wait()
