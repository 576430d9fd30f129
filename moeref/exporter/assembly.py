"""Makes an export straight in buckets. What goes where is worked out once for a plan; an export only moves bytes.

Calls of torch for each tensor cost more than the copy of a small one. Here most tensors are one run of bytes both in
their source, a parameter or a message, and in the bucket, and take one `memmove` each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from moeref.dtypes import DTYPES
from moeref.exporter.batches import Batch, Ranks
from moeref.exporter.copies import Copy, merged
from moeref.exporter.cuts import BucketError, Cut, apart, cuts
from moeref.exporter.plan import Plan
from moeref.exporter.transfer import LONG, Transfer
from moeref.torch_dtypes import TORCH


class ByteRun(NamedTuple):
    """Contiguous bytes, `nbytes` of them: from byte `source` of a shard to byte `into` of its tensors in a bucket."""

    into: int
    source: int
    nbytes: int


class ShardCopies(NamedTuple):
    """All `copies` of a shard into a bucket: those that one `memmove` of bytes can do, as `runs`, and the `rest`."""

    runs: tuple[ByteRun, ...]
    rest: tuple[Copy, ...]
    copies: tuple[Copy, ...]


class PlacedShard(NamedTuple):
    """A shard and where its elements go: `part` is its TP (ETP) rank, `number` that of its parameter in the plan.

    Its copies count from byte `first` of the bucket.
    """

    number: int
    part: int
    first: int
    copies: ShardCopies


class Segment(NamedTuple):
    """The shards of one batch that go into one bucket: where batches and buckets end need not agree.

    `opens` and `closes` say whether these shards are the first and the last of the bucket. A batch of which this rank
    receives nothing has no bucket and no shards.
    """

    batch: Batch | None  # None but in the first segment of a batch
    cut: Cut | None
    shards: tuple[PlacedShard, ...]
    opens: bool
    closes: bool


class Filled(NamedTuple):
    """A bucket's tensors in memory."""

    cut: Cut
    memory: torch.Tensor


def segments(plan: Plan, rank: int, limit: int | None, unit: Callable[[str], str]) -> tuple[Segment, ...]:
    """What `rank` receives of an export of `plan`, in buckets, in order. Worked out once for a plan.

    Raises BucketError on every rank if tensors of a unit are apart or go to different ranks.
    """
    return plan.kept((rank, limit, unit), lambda: tuple(_segments(plan, rank, _cuts(plan, rank, limit, unit))))


def _cuts(plan: Plan, rank: int, limit: int | None, unit: Callable[[str], str]) -> tuple[Cut, ...]:
    _check_units(plan, unit)
    return cuts(plan.received(rank), limit, unit)


def _check_units(plan: Plan, unit: Callable[[str], str]) -> None:
    """Raise BucketError if tensors of a unit are apart, on whatever rank, or go to different ranks."""
    where: dict[str, Ranks] = {}
    last: dict[Ranks, str] = {}
    for (step, _), to in zip(plan.params, plan.to, strict=True):
        for tensor in step.tensors:
            key = unit(tensor.name)
            home = where.get(key)
            if home not in (None, to):
                raise BucketError(
                    f"{tensor.name}: goes to another rank than others of {key}, which a loader needs whole"
                )
            if home and last[to] != key:
                raise apart(tensor.name, key)
            where[key] = to
            last[to] = key


def _segments(plan: Plan, rank: int, in_order: tuple[Cut, ...]) -> Iterator[Segment]:
    where = {entry.name: (number, entry.offset) for number, cut in enumerate(in_order) for entry in cut.entries}
    alike = dict[tuple[int, int, bool], list[ShardCopies]]()
    begun = -1
    for batch in plan.batches:
        in_cut: dict[int, list[PlacedShard]] = {}
        for number in batch.params:
            if rank in plan.to[number]:
                _place_shards(in_cut, plan, number, where, alike)
        if not in_cut:
            yield Segment(batch, None, (), False, False)
        starts: Batch | None = batch
        for cut, shards in in_cut.items():
            step, param = plan.params[shards[-1].number]
            closes = param is step.params[-1] and in_order[cut].entries[-1].name in [tensor.name for tensor in param.hf]
            yield Segment(starts, in_order[cut], tuple(shards), cut != begun, closes)
            starts, begun = None, cut


def _place_shards(
    in_cut: dict[int, list[PlacedShard]],
    plan: Plan,
    number: int,
    where: dict[str, tuple[int, int]],
    alike: dict[tuple[int, int, bool], list[ShardCopies]],
) -> None:
    """Add the shards of parameter `number` to `in_cut`. Its tensors are side by side, if they are in one bucket."""
    param = plan.params[number][1]
    places = [where[tensor.name] for tensor in param.hf]
    parts, whole = plan.copies(param), places[0][0] == places[-1][0]
    for start in range(1 if whole else len(places)):
        cut, first = places[start]
        key = id(parts), start, whole  # by id, as experts share theirs, and a hash of all copies is slow
        if key not in alike:
            group = slice(start, None if whole else start + 1)
            offsets = [at - first for _, at in places[group]]
            alike[key] = [_shard_copies(part[group], offsets, DTYPES[param.dtype].bytes) for part in parts]
        in_cut.setdefault(cut, []).extend([PlacedShard(number, part, first, c) for part, c in enumerate(alike[key])])


def _shard_copies(tensors: Sequence[tuple[Copy, ...]], offsets: Sequence[int], width: int) -> ShardCopies:
    """The copies into tensors that begin at these bytes: those that are runs of bytes, and the others."""
    placed = merged(c.shifted(at // width) for copies, at in zip(tensors, offsets, strict=True) for c in copies)
    is_run = [c.is_run and c.size[0] * width < LONG for c in placed]
    pairs = list(zip(placed, is_run, strict=True))
    runs = (ByteRun(c.into.offset * width, c.source.offset * width, c.size[0] * width) for c, run in pairs if run)
    return ShardCopies(tuple(runs), tuple(c for c, run in pairs if not run), placed)


def fill(
    transfer: Transfer,
    plan: Plan,
    todo: tuple[Segment, ...],
    memory: Callable[[int], torch.Tensor],
    at: Callable[[str], None],
) -> Iterator[Filled]:
    """Move an export, segment by segment, into what `memory` gives for each bucket; `at` gets each tensor's name.

    A rank that receives nothing yields nothing.
    """
    room: torch.Tensor | None = None
    for batch, cut, shards, opens, closes in todo:
        if batch:
            at(plan.params[batch.params.start][1].hf[0].name)
            transfer.begin(batch)
        if cut is None:
            continue
        at(plan.params[shards[0].number][1].hf[0].name)
        if opens or room is None:
            room = memory(cut.nbytes)
        _move(transfer, plan, shards, room)
        if closes:
            at(cut.entries[-1].name)
            filled, room = Filled(cut, room), None
            yield filled
            del filled


def _move(transfer: Transfer, plan: Plan, shards: tuple[PlacedShard, ...], memory: torch.Tensor) -> None:
    move, address, params = ctypes.memmove, transfer.address, plan.params
    base = memory.data_ptr() if memory.device.type == "cpu" else 0
    whole = memory[: memory.numel() // 8 * 8]  # A view of all for each dtype: one a tensor takes longer than its copy.
    typed = {dtype: whole.view(dtype) for dtype in TORCH.values()}
    for number, part, first, (runs, rest, copies) in shards:
        start = address(number, part) if runs and base else 0
        if start:
            place = base + first
            for into, source, nbytes in runs:
                move(place + into, start + source, nbytes)
            copies = rest
        if copies:
            param = params[number][1]
            dtype = TORCH[param.dtype]
            transfer.source(number, part, param).copy_into(typed[dtype], first // dtype.itemsize, copies)
