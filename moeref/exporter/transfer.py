"""Shards on their way from their owners to the receivers, at most `Plan.in_flight_bytes` at a time.

All ranks begin the batches of the plan in its order. Before a batch travels they say whether all is well, so that no
rank gets more than it has room for, and none waits for one that has failed. The next batch begins to travel before the
one that has arrived is read.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from moeref.bridge.shard_map import GlobalParam
from moeref.dtypes import DTYPES
from moeref.exporter.batches import Batch, ShardMessage
from moeref.exporter.copies import Copy
from moeref.exporter.peer import Buffers, Peer
from moeref.torch_dtypes import TORCH

#: From so many bytes on torch copies, which may use several threads; below that memmove: calls of torch take longer.
LONG = 1 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Stopped(Exception):
    """Another rank has failed, so that no more shards are sent."""


class Source(NamedTuple):
    """A shard: contiguous in `memory` from element `offset` of its storage on."""

    memory: torch.Tensor
    offset: int

    def copy_into(self, full: torch.Tensor, first: int, copies: Iterable[Copy]) -> None:
        """Make `copies`, which count from element `first` of `full`."""
        start = int(full.storage_offset()) + first
        for size, into, source in copies:
            place = full.as_strided(size, into.strides, start + into.offset)
            place.copy_(self.memory.as_strided(size, source.strides, self.offset + source.offset))


class _Parcel(NamedTuple):
    """A message that this rank sends or receives, and where it lies in the buffer of its batch."""

    message: ShardMessage
    memory: torch.Tensor


class _Travel:
    """This rank's messages of a batch on their way, one after the other in one buffer."""

    def __init__(self, peer: Peer, batch: Batch, buffer: torch.Tensor) -> None:
        self.batch, self.buffer, self._peer = batch, buffer, peer
        self.sent, self.received = list[_Parcel](), list[_Parcel]()
        self._works = deque[tuple[tuple[ShardMessage, ...], dist.Work]]()
        end = 0
        for message in mine(batch, peer.rank):
            parcel = _Parcel(message, buffer[end : end + message.nbytes])
            (self.sent if message.owner == peer.rank else self.received).append(parcel)
            end += message.nbytes

    def begin(self) -> None:
        """Send and receive. One call, since NCCL lets two ranks that send to each other wait forever otherwise."""
        rank, peer = self._peer.rank, self._peer
        to = [(m, peer.send(memory, r)) for m, memory in self.sent for r in m.receivers if r != rank]
        ops = to + [(message, peer.receive(memory, message.owner)) for message, memory in self.received]
        if not ops:
            return
        messages = tuple(message for message, _ in ops)
        with peer.naming(messages):
            works = dist.batch_isend_irecv([op for _, op in ops])
        each = [(m,) for m in messages] if len(works) == len(ops) else [messages] * len(works)
        self._works.extend(zip(each, works, strict=True))

    def wait(self) -> None:
        """Wait for all messages."""
        while self._works:
            messages, work = self._works.popleft()
            with self._peer.naming(messages):
                work.wait()

    def arrived(self) -> dict[tuple[int, int], int]:
        """Where every shard that came lies in the buffer, in bytes, by (number of its parameter, part)."""
        starts = [(memory.data_ptr() - self.buffer.data_ptr(), message.shards) for message, memory in self.received]
        return {(number, part): start + at for start, shards in starts for number, part, at in shards}


def mine(batch: Batch, rank: int) -> Iterator[ShardMessage]:
    """The messages of a batch that `rank` sends or receives."""
    return (m for m in batch.messages if m.owner == rank or rank in m.receivers)


def _address(shard: torch.Tensor) -> int:
    """The address of a shard that is contiguous in the memory of this host; 0 for any other."""
    # A tensor of another class may keep its elements elsewhere; one without storage has address 0.
    is_plain = type(shard) in _PLAIN and shard.is_cpu and shard.is_contiguous()
    return shard.data_ptr() if is_plain else 0


class Transfer:
    """A rank's part in the messages of an export."""

    def __init__(self, peer: Peer, held: Mapping[str, torch.Tensor]) -> None:
        self._peer, self._held = peer, held
        batches = [batch for batch in peer.plan.batches if batch.messages]
        self._unsent = deque((batch, sum(m.nbytes for m in mine(batch, peer.rank))) for batch in batches)
        self._buffers = Buffers(peer, [nbytes for _, nbytes in self._unsent])
        self._going = deque[_Travel]()
        self._here: _Travel | None = None
        self._arrived: dict[tuple[int, int], int] = {}
        self._typed: dict[str, torch.Tensor] = {}  # the buffer they came in, as each dtype
        self._base = 0  # its address on this host

    def begin(self, batch: Batch) -> None:
        """Make the shards of `batch` available. All ranks begin the batches of the plan in order.

        Raises Stopped if another rank has failed.
        """
        self.end()
        if not batch.messages:
            return
        if not self._going:
            self._send()
        if self._unsent and self._fit(batch, self._unsent[0][0]):
            self._send()
        self._here = self._going[0]
        self._here.wait()
        self._going.popleft()
        self._arrived, buffer = self._here.arrived(), self._here.buffer
        self._typed = {name: buffer.view(dtype) for name, dtype in TORCH.items()}  # its size is a multiple of ALIGNMENT
        self._base = buffer.data_ptr() if buffer.device.type == "cpu" else 0

    def _fit(self, *batches: Batch) -> bool:
        """Whether these batches may be in flight together. All ranks come to the same answer."""
        return all(batch.nbytes <= self._peer.plan.in_flight_bytes // 2 for batch in batches)

    def _send(self) -> None:
        """Let the next batch begin to travel."""
        batch, nbytes = self._unsent[0]
        travel = _Travel(self._peer, batch, self._buffers.take(nbytes))
        for parcel in travel.sent:
            with self._peer.naming([parcel.message]):
                self._pack(parcel)
        with self._peer.naming(batch.messages):
            is_well = self._peer.all_well(True)
        if not is_well:
            self._unsent.clear()
            raise Stopped
        self._unsent.popleft()
        self._going.append(travel)
        travel.begin()

    def _pack(self, parcel: _Parcel) -> None:
        params, memory = self._peer.plan.params, parcel.memory
        base = memory.data_ptr() if memory.is_cpu else 0
        for number, _, offset in parcel.message.shards:
            shard = self._held[params[number][1].name]
            nbytes = shard.nbytes
            start = _address(shard) if base and nbytes < LONG else 0
            if start:
                ctypes.memmove(base + offset, start, nbytes)
            else:
                memory[offset : offset + nbytes].view(shard.dtype).view(shard.shape).copy_(shard.detach())

    def source(self, number: int, part: int, param: GlobalParam) -> Source:
        """A shard of the batch that has begun. This rank's own is not copied."""
        at = self._arrived.get((number, part))
        if at is not None:
            return Source(self._typed[param.dtype], at // DTYPES[param.dtype].bytes)
        own = self._held[param.name].detach().contiguous()
        return Source(own, int(own.storage_offset()))

    def address(self, number: int, part: int) -> int:
        """Where the shard lies in the memory of this host, contiguous; 0 if it does not."""
        at = self._arrived.get((number, part))
        if at is None:
            return _address(self._held[self._peer.plan.params[number][1].name])
        return self._base and self._base + at

    def end(self) -> None:
        """Give up the batch that is here: its shards are not read any more."""
        self._arrived, self._typed = {}, {}
        if self._here:
            self._buffers.give(self._here.buffer)
            self._here = None

    def abort(self) -> None:
        """After a failure: end what has begun, and tell the other ranks, where they would go on."""
        self._arrived, self._typed, self._here = {}, {}, None
        while self._going:
            with suppress(RuntimeError):
                self._going.popleft().wait()
        if self._unsent:
            self._unsent.clear()
            self._peer.all_well(False)
