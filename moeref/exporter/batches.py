"""Which shards travel in one message. Arithmetic that all ranks do alike, without torch.

Small tensors would each pay the latency of a message. So the parameters of a plan are cut into batches, and in each
batch an owner sends all of its shards to the writer as one message of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from moeref.bridge.shard_map import GlobalParam, ShardMap
from moeref.dtypes import DTYPES
from moeref.families import ParamMapping

#: Shards begin at multiples of this many bytes, so that a message can be read as any dtype. The first so many bytes are
#: the message's state.
ALIGNMENT = 16


class Sent(NamedTuple):
    """A shard in a message: the number of its parameter in the plan, its TP (ETP) rank and its first byte."""

    param: int
    part: int
    offset: int


class Message(NamedTuple):
    """The shards that one rank sends in a batch."""

    owner: int
    shards: tuple[Sent, ...]
    nbytes: int


class Batch(NamedTuple):
    """Parameters that follow each other in a plan, by number, and the messages with their shards."""

    params: range
    messages: tuple[Message, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(message.nbytes for message in self.messages)


def batches(shard_map: ShardMap, params: Sequence[GlobalParam], writer: int, limit: int) -> Iterator[Batch]:
    """All parameters in order. The messages of a batch have `limit` bytes, or the shards of one parameter if more."""
    if shard_map.layout.world == 1:
        yield Batch(range(len(params)), ())
        return
    first, made = 0, _Batch()
    alike: dict[tuple[ParamMapping, tuple[int, ...]], list[tuple[int, int, int]]] = {}
    for number, param in enumerate(params):
        key = param.mapping, shard_map.owners(param)
        if key not in alike:
            alike[key] = _sizes(shard_map, param, writer)
        sent = alike[key]
        if made.shards and made.with_(sent) > limit:
            yield made.done(range(first, number))
            first, made = number, _Batch()
        made.add(number, sent)
    yield made.done(range(first, len(params)))


def _sizes(shard_map: ShardMap, param: GlobalParam, writer: int) -> list[tuple[int, int, int]]:
    """(owner, part, bytes) of every shard of `param` that the writer does not hold; the same for every expert."""
    width = DTYPES[param.dtype].bytes
    owners = enumerate(shard_map.owners(param))
    return [(o, part, width * prod(shard_map.shard(param, part).shape)) for part, o in owners if o != writer]


class _Batch:
    """A batch in the making: the shards of each owner, and where its next one begins."""

    def __init__(self) -> None:
        self.shards: dict[int, list[Sent]] = {}
        self._ends: dict[int, int] = {}

    def with_(self, sent: list[tuple[int, int, int]]) -> int:
        """The bytes of all messages once these shards are added."""
        more = sum(_aligned(nbytes) + (0 if owner in self._ends else ALIGNMENT) for owner, _, nbytes in sent)
        return sum(self._ends.values()) + more

    def add(self, number: int, sent: list[tuple[int, int, int]]) -> None:
        for owner, part, nbytes in sent:
            at = self._ends.get(owner, ALIGNMENT)
            self.shards.setdefault(owner, []).append(Sent(number, part, at))
            self._ends[owner] = at + _aligned(nbytes)

    def done(self, params: range) -> Batch:
        messages = (Message(owner, tuple(shards), self._ends[owner]) for owner, shards in self.shards.items())
        return Batch(params, tuple(messages))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
