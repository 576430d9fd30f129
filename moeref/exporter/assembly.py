"""An export made straight in buckets: what goes where is worked out once a plan, and an export only moves bytes.

A tensor at a time, Python and torch cost more than the copy of a small tensor. Here most tensors are a run of bytes, in
the memory of a parameter or of a message and in the bucket, and one `memmove` each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from moeref.dtypes import DTYPES
from moeref.exporter.batches import Batch, Ranks
from moeref.exporter.copies import Copy, merged
from moeref.exporter.cuts import BucketError, Cut, cuts
from moeref.exporter.plan import Plan
from moeref.exporter.transfer import LONG, Transfer
from moeref.torch_dtypes import TORCH


class Run(NamedTuple):
    """Bytes that follow each other in a shard and in a tensor: the first in each, and how many."""

    into: int
    source: int
    nbytes: int


class Moved(NamedTuple):
    """What is copied of a shard. The `runs` are among the `copies`; `rest` are others."""

    runs: tuple[Run, ...]
    rest: tuple[Copy, ...]
    copies: tuple[Copy, ...]


class Piece(NamedTuple):
    """What shard `part` of parameter `number` has of a bucket's tensors that begin at byte `first`."""

    number: int
    part: int
    first: int
    moved: Moved


class Segment(NamedTuple):
    """The pieces of one batch in one bucket; `begins` and `ends` say whether they are its first and last.

    A batch of which this rank receives nothing has no bucket and no pieces.
    """

    batch: Batch | None  # that begins here
    cut: Cut | None
    pieces: tuple[Piece, ...]
    begins: bool
    ends: bool


class Filled(NamedTuple):
    """A bucket's tensors in memory."""

    cut: Cut
    memory: torch.Tensor


def segments(plan: Plan, rank: int, limit: int | None, unit: Callable[[str], str]) -> tuple[Segment, ...]:
    """What `rank` receives of an export of `plan`, in buckets, in order. Worked out once.

    Raises BucketError on every rank if tensors of a unit are apart or go to different ranks.
    """
    return plan.kept((rank, limit, unit), lambda: tuple(_segments(plan, rank, _cuts(plan, rank, limit, unit))))


def _cuts(plan: Plan, rank: int, limit: int | None, unit: Callable[[str], str]) -> tuple[Cut, ...]:
    if plan.receivers != "share":
        return cuts(plan.received(rank), limit, unit)
    where: dict[str, Ranks] = {}
    for (step, _), to in zip(plan.params, plan.to, strict=True):
        for tensor in step.tensors:
            key = unit(tensor.name)
            if where.setdefault(key, to) != to:
                raise BucketError(
                    f"{tensor.name}: goes to another rank than others of {key}, which a loader needs whole"
                )
    return cuts(plan.received(rank), limit, unit)


def _segments(plan: Plan, rank: int, found: tuple[Cut, ...]) -> Iterator[Segment]:
    where = {entry.name: (number, entry.offset) for number, cut in enumerate(found) for entry in cut.entries}
    alike = dict[tuple[int, int, bool], list[Moved]]()
    begun = -1
    for batch in plan.batches:
        in_cut: dict[int, list[Piece]] = {}
        for number in batch.params:
            if rank in plan.to[number]:
                _add_pieces(in_cut, plan, number, where, alike)
        if not in_cut:
            yield Segment(batch, None, (), False, False)
        starts: Batch | None = batch
        for cut, pieces in in_cut.items():
            step, param = plan.params[pieces[-1].number]
            ends = param is step.params[-1] and found[cut].entries[-1].name in [tensor.name for tensor in param.hf]
            yield Segment(starts, found[cut], tuple(pieces), cut != begun, ends)
            starts, begun = None, cut


def _add_pieces(
    in_cut: dict[int, list[Piece]],
    plan: Plan,
    number: int,
    where: dict[str, tuple[int, int]],
    alike: dict[tuple[int, int, bool], list[Moved]],
) -> None:
    """What each shard of parameter `number` has of its tensors; these are side by side, if they are in one bucket."""
    param = plan.params[number][1]
    places = [where[tensor.name] for tensor in param.hf]
    parts, whole = plan.copies(param), places[0][0] == places[-1][0]
    for start in range(1 if whole else len(places)):
        cut, first = places[start]
        key = id(parts), start, whole  # by id, as experts share theirs, and a hash of all copies is slow
        if key not in alike:
            group = slice(start, None if whole else start + 1)
            offsets = [at - first for _, at in places[group]]
            alike[key] = [_moved(part[group], offsets, DTYPES[param.dtype].bytes) for part in parts]
        in_cut.setdefault(cut, []).extend([Piece(number, part, first, m) for part, m in enumerate(alike[key])])


def _moved(tensors: Sequence[tuple[Copy, ...]], offsets: Sequence[int], width: int) -> Moved:
    """The copies into tensors that begin at these bytes: those that are runs of bytes, and the others."""
    placed = merged(c.moved(at // width) for copies, at in zip(tensors, offsets, strict=True) for c in copies)
    is_run = [c.is_run and c.size[0] * width < LONG for c in placed]
    pairs = list(zip(placed, is_run, strict=True))
    runs = (Run(c.into.offset * width, c.source.offset * width, c.size[0] * width) for c, run in pairs if run)
    return Moved(tuple(runs), tuple(c for c, run in pairs if not run), placed)


def fill(
    transfer: Transfer,
    plan: Plan,
    todo: tuple[Segment, ...],
    memory: Callable[[int], torch.Tensor],
    at: Callable[[str], None],
) -> Iterator[Filled]:
    """Move an export, segment by segment, into what `memory` gives for each bucket; tell `at` what tensor is next.

    A rank that receives nothing yields nothing.
    """
    room: torch.Tensor | None = None
    for batch, cut, pieces, begins, ends in todo:
        if batch:
            at(plan.params[batch.params.start][1].hf[0].name)
            transfer.begin(batch)
        if cut is None:
            continue
        at(plan.params[pieces[0].number][1].hf[0].name)
        if begins or room is None:
            room = memory(cut.nbytes)
        _move(transfer, plan, pieces, room)
        if ends:
            at(cut.entries[-1].name)
            filled, room = Filled(cut, room), None
            yield filled
            del filled


def _move(transfer: Transfer, plan: Plan, pieces: tuple[Piece, ...], memory: torch.Tensor) -> None:
    move, address, params = ctypes.memmove, transfer.address, plan.params
    base = memory.data_ptr() if memory.device.type == "cpu" else 0
    whole = memory[: memory.numel() // 8 * 8]  # A view of all for each dtype: one a tensor takes longer than its copy.
    typed = {dtype: whole.view(dtype) for dtype in TORCH.values()}
    for number, part, first, (runs, rest, copies) in pieces:
        start = address(number, part) if runs and base else 0
        if start:
            place = base + first
            for into, source, nbytes in runs:
                move(place + into, start + source, nbytes)
            copies = rest
        if copies:
            param = params[number][1]
            dtype = TORCH[param.dtype]
            _strided(typed[dtype], first // dtype.itemsize, copies, *transfer.source(number, part, param))


def _strided(full: torch.Tensor, first: int, copies: tuple[Copy, ...], memory: torch.Tensor, offset: int) -> None:
    """Into the tensor from element `first` of `full` on, from `offset` of the storage of `memory`."""
    start = int(full.storage_offset()) + first
    for size, into, source in copies:
        place = full.as_strided(size, into.strides, start + into.offset)
        place.copy_(memory.as_strided(size, source.strides, offset + source.offset))
