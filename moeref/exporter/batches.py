"""Which shards travel in one message. Arithmetic that all ranks do alike, without torch.

Small tensors would each pay the latency of a message. So the parameters of a plan are cut into batches, and in each
batch an owner sends all of its shards for the same receivers as one message of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from moeref.bridge.shard_map import GlobalParam, ShardMap
from moeref.dtypes import DTYPES

#: Shards begin at multiples of this many bytes, so that a message can be read as any dtype.
ALIGNMENT = 16
Ranks = tuple[int, ...]
#: Owner and part of a shard, and its bytes up to where the next one begins.
_Sized = tuple[int, int, int]


class Sent(NamedTuple):
    """A shard in a message: the number of its parameter in the plan, its TP (ETP) rank and its first byte."""

    param: int
    part: int
    offset: int


class ShardMessage(NamedTuple):
    """The shards that one rank sends to `receivers` in a batch. An owner among them reads its own memory instead."""

    owner: int
    receivers: Ranks
    shards: tuple[Sent, ...]
    nbytes: int


class Batch(NamedTuple):
    """Parameters that follow each other in a plan, by number, and the messages with their shards.

    nbytes: bytes, at most, of the messages that one rank sends and receives.
    """

    params: range
    messages: tuple[ShardMessage, ...]
    nbytes: int


def batches(
    shard_map: ShardMap, params: Sequence[GlobalParam], receivers: Sequence[Ranks], limit: int
) -> Iterator[Batch]:
    """All parameters in order, each for its receivers. A batch has at most `limit` bytes, or one parameter."""
    if shard_map.layout.world == 1:
        yield Batch(range(len(params)), (), 0)
        return
    first, made = 0, _Batch()
    alike: dict[tuple[int, Ranks, Ranks], tuple[list[_Sized], dict[int | None, int]]] = {}
    for number, param in enumerate(params):
        to = receivers[number]
        key = id(param.mapping), shard_map.owners(param), to
        found = alike.get(key)
        if not found:
            sent = _sizes(shard_map, param, to)
            found = alike[key] = sent, _loads(sent, to)
        sent, loads = found
        if made.shards and made.with_(loads) > limit:
            yield made.done(range(first, number))
            first, made = number, _Batch()
        made.add(number, sent, loads, to)
    yield made.done(range(first, len(params)))


def _sizes(shard_map: ShardMap, param: GlobalParam, to: Ranks) -> list[_Sized]:
    """Every shard of `param` that travels; the same for every expert."""
    width = DTYPES[param.dtype].bytes
    owners = enumerate(shard_map.owners(param))
    return [(o, n, _aligned(width * prod(shard_map.shard(param, n).shape))) for n, o in owners if to != (o,)]


def _loads(sent: list[_Sized], to: Ranks) -> dict[int | None, int]:
    """The bytes of messages by rank that holds them; under None those that any rank may hold, if several receive."""
    loads: dict[int | None, int] = {}
    for owner, _, nbytes in sent:
        for rank in (owner, to[0]) if len(to) == 1 else (None,):
            loads[rank] = loads.get(rank, 0) + nbytes
    return loads


class _Batch:
    """A batch in the making: the shards by (owner, receivers), and where the next one begins."""

    def __init__(self) -> None:
        self.shards: dict[tuple[int, Ranks], list[Sent]] = {}
        self._ends: dict[tuple[int, Ranks], int] = {}
        self._loads: dict[int | None, int] = {}
        self._most = 0

    def with_(self, loads: dict[int | None, int]) -> int:
        """The bytes that one rank holds at most once shards with these `loads` are added."""
        return max([self._most, *[self._loads.get(rank, 0) + nbytes for rank, nbytes in loads.items()]])

    def add(self, number: int, sent: list[_Sized], loads: dict[int | None, int], to: Ranks) -> None:
        for rank, nbytes in loads.items():
            self._loads[rank] = load = self._loads.get(rank, 0) + nbytes
            self._most = max(self._most, load)
        for owner, part, nbytes in sent:
            at = self._ends.get((owner, to), 0)
            self.shards.setdefault((owner, to), []).append(Sent(number, part, at))
            self._ends[owner, to] = at + nbytes

    def done(self, params: range) -> Batch:
        messages = (ShardMessage(*key, tuple(shards), self._ends[key]) for key, shards in self.shards.items())
        return Batch(params, tuple(messages), self._most)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
