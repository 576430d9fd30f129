"""The export plan: which Hugging Face tensors come out, in which order, from which parameters. No collective, no torch.

Every rank makes the same plan from the shard map alone. Names and order depend neither on the layout nor on the rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from moeref.bridge.shard_map import GlobalParam, HFTensor, ShardMap, hashed
from moeref.bridge.uncollected import uncollected
from moeref.exporter import batches
from moeref.exporter import receivers as options
from moeref.exporter.batches import Batch, Ranks
from moeref.exporter.copies import Copy, copies
from moeref.exporter.receivers import Receivers
from moeref.families import ParamMapping

T = TypeVar("T")
#: The TP (ETP) ranks of shards, and what is copied from each.
PartCopies = tuple[tuple[int, Copy], ...]
#: Bytes that travel to a receiver at a time.
IN_FLIGHT_BYTES = 64 << 20


class ExportError(RuntimeError):
    """An export cannot begin, as no rank would receive it or the ranks do not agree, or it failed on a rank."""


class Step(NamedTuple):
    """Parameters that are sent together and the Hugging Face tensors made of them: one parameter and its tensors (q, k,
    v of a linear_qkv), or those of all experts and the one fused tensor they fill."""

    params: tuple[GlobalParam, ...]
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True)
class Plan:
    """What an export sends, in order, and the ranks that get it. Raises ExportError for options that name no receiver.

    in_flight_bytes: shards travel in messages; this bounds the bytes of those that a rank holds at a time, unless the
    shards of one parameter have more.

    receivers: "writer", the one rank `writer` gets all tensors; "node", the first of every `ranks_per_node` ranks gets
    all; "share", each rank gets a part of the tensors, of about equal bytes, units (`unit_of`) whole; "all", every rank
    gets all.
    """

    shard_map: ShardMap
    writer: int = 0
    in_flight_bytes: int = IN_FLIGHT_BYTES
    receivers: Receivers = "writer"
    ranks_per_node: int | None = None
    _copies: dict[tuple[ParamMapping, int | None], tuple[tuple[tuple[Copy, ...], ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _tensor_copies: dict[int, tuple[PartCopies, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.shard_map.layout
        if type(self.in_flight_bytes) is not int or self.in_flight_bytes < 1:
            raise ExportError(f"in_flight_bytes={self.in_flight_bytes!r} is no number of bytes")
        if wrong := options.wrong(self.receivers, self.writer, self.ranks_per_node, layout):
            raise ExportError(wrong)

    @functools.cached_property
    @uncollected
    def steps(self) -> tuple[Step, ...]:
        """Steps in canonical order."""
        together: dict[str, list[GlobalParam]] = {}
        for param in self.shard_map.global_params:
            if param.exports:
                together.setdefault(param.hf[0].name, []).append(param)
        return tuple(Step(tuple(params), params[0].hf) for params in together.values())

    @functools.cached_property
    def tensors(self) -> tuple[HFTensor, ...]:
        """Every tensor of the stream in order."""
        return tuple(t for step in self.steps for t in step.tensors)

    @functools.cached_property
    @uncollected
    def params(self) -> tuple[tuple[Step, GlobalParam], ...]:
        """Every parameter that is sent, in order, with its step."""
        return tuple((step, param) for step in self.steps for param in step.params)

    @functools.cached_property
    @uncollected
    def batches(self) -> tuple[Batch, ...]:
        """The parameters by number, cut into batches; two of them are in flight at a time."""
        params = [param for _, param in self.params]
        return tuple(batches.batches(self.shard_map, params, self.to, self.in_flight_bytes // 2))

    @functools.cached_property
    def to(self) -> tuple[Ranks, ...]:
        """The ranks that receive each of `params`."""
        if self.receivers == "share":
            each = options.shares([step.tensors for step in self.steps], self.shard_map.layout.world)
        else:
            who = options.common(self.receivers, self.writer, self.ranks_per_node, self.shard_map.layout.world)
            each = (who,) * len(self.steps)
        return tuple(who for step, who in zip(self.steps, each, strict=True) for _ in step.params)

    def received(self, rank: int) -> tuple[HFTensor, ...]:
        """The tensors of the stream that `rank` gets, in order."""
        last = ((step, to) for (step, param), to in zip(self.params, self.to, strict=True) if param is step.params[-1])
        return tuple(t for step, to in last if rank in to for t in step.tensors)

    def copies(self, param: GlobalParam) -> tuple[tuple[tuple[Copy, ...], ...], ...]:
        """For each shard of `param`, and for each of its Hugging Face tensors, the copies that move one into the other.

        One object for all parameters of a kind, which the plan keeps.
        """
        kind = self.shard_map.kind(param)
        found = self._copies.get(kind)
        if not found:
            shards = (self.shard_map.shard(param, part) for part in range(len(self.shard_map.owners(param))))
            shapes = [tensor.shape for tensor in param.hf]
            found = self._copies[kind] = tuple(copies(shard, shapes) for shard in shards)
        return found

    def tensor_copies(self, number: int) -> tuple[PartCopies, ...]:
        """For each Hugging Face tensor of parameter `number` the copies that fill it, each with its part."""
        if number not in self._tensor_copies:
            param = self.params[number][1]
            parts = self.copies(param)
            self._tensor_copies[number] = tuple(
                tuple((part, copy) for part, tensors in enumerate(parts) for copy in tensors[index])
                for index in range(len(param.hf))
            )
        return self._tensor_copies[number]

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` works out from this plan, once for each key. It may depend on nothing else, such as weights."""
        if key not in self._kept:
            self._kept[key] = uncollected(make)()
        found: T = self._kept[key]
        return found

    @functools.cached_property
    def digest(self) -> int:
        """63 bits of the hash of shard map, names, receivers and bytes in flight: if ranks differ, nothing is sent."""
        to = self.receivers, self.writer, self.ranks_per_node
        return hashed(self.shard_map.digest, *to, self.in_flight_bytes, [t.name for t in self.tensors])
