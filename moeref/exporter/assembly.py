"""An export made straight in buckets: what goes where is worked out once a plan, and an export only moves bytes.

A tensor at a time, Python and torch cost more than the copy of a small tensor. Here most tensors are a run of bytes, in
the memory of a parameter or of a message and in the bucket, and one `memmove` each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from moeref.dtypes import DTYPES
from moeref.exporter.batches import Batch, Ranks
from moeref.exporter.copies import Copy
from moeref.exporter.cuts import BucketError, Cut, Entry, cuts
from moeref.exporter.plan import Plan
from moeref.exporter.transfer import LONG, Transfer
from moeref.torch_dtypes import TORCH


class Run(NamedTuple):
    """Bytes that follow each other in a shard and in a tensor: the first in each, and how many."""

    into: int
    source: int
    nbytes: int


class Piece(NamedTuple):
    """What shard `part` of parameter `number` has of a tensor. The `runs` are among the `copies`; `rest` are others."""

    number: int
    part: int
    entry: Entry
    runs: tuple[Run, ...]
    rest: tuple[Copy, ...]
    copies: tuple[Copy, ...]


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


#: Runs, other copies, and all copies as the plan has them, by the id of these.
_Alike = dict[int, tuple[tuple[Run, ...], tuple[Copy, ...], tuple[Copy, ...]]]


def segments(plan: Plan, rank: int, limit: int, unit: Callable[[str], str]) -> tuple[Segment, ...]:
    """What `rank` receives of an export of `plan`, in buckets, in order. Worked out once.

    Raises BucketError on every rank if tensors of a unit are apart or go to different ranks.
    """
    return plan.kept((rank, limit, unit), lambda: tuple(_segments(plan, rank, _cuts(plan, rank, limit, unit))))


def _cuts(plan: Plan, rank: int, limit: int, unit: Callable[[str], str]) -> tuple[Cut, ...]:
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
    where = {entry.name: (entry, number) for number, cut in enumerate(found) for entry in cut.entries}
    alike: _Alike = {}
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
            last = pieces[-1]
            step, param = plan.params[last.number]
            ends = last.entry is found[cut].entries[-1] and param is step.params[-1]
            yield Segment(starts, found[cut], tuple(pieces), cut != begun, ends)
            starts, begun = None, cut


def _add_pieces(
    in_cut: dict[int, list[Piece]], plan: Plan, number: int, where: dict[str, tuple[Entry, int]], alike: _Alike
) -> None:
    """What each shard of parameter `number` has of each of its tensors."""
    param = plan.params[number][1]
    parts = [plan.copies(param, part) for part in range(len(plan.shard_map.owners(param)))]
    for index, tensor in enumerate(param.hf):
        entry, cut = where[tensor.name]
        pieces = in_cut.setdefault(cut, [])
        for part, copies in enumerate(parts):
            mine = copies[index]
            # By id, as experts share theirs. The copies are kept too, so that their id stays their own.
            moved = alike.get(id(mine))
            if not moved:
                moved = alike[id(mine)] = *_sorted(mine, DTYPES[param.dtype].bytes), mine
            pieces.append(Piece(number, part, entry, *moved))


def _sorted(copies: tuple[Copy, ...], width: int) -> tuple[tuple[Run, ...], tuple[Copy, ...]]:
    """The copies that are runs of bytes, and the others."""
    is_run = [c.into.strides == c.source.strides == (1,) and c.size[0] * width < LONG for c in copies]
    pairs = list(zip(copies, is_run, strict=True))
    runs = (Run(c.into.offset * width, c.source.offset * width, c.size[0] * width) for c, run in pairs if run)
    return tuple(runs), tuple(c for c, run in pairs if not run)


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
        at(pieces[0].entry.name)
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
    for number, part, entry, runs, rest, copies in pieces:
        start = address(number, part) if runs and base else 0
        if start:
            place = base + entry.offset
            for into, source, nbytes in runs:
                move(place + into, start + source, nbytes)
            copies = rest
        if copies:
            first = entry.offset // entry.dtype.itemsize
            _strided(typed[entry.dtype], first, copies, *transfer.source(number, part, params[number][1]))


def _strided(full: torch.Tensor, first: int, copies: tuple[Copy, ...], memory: torch.Tensor, offset: int) -> None:
    """Into the tensor from element `first` of `full` on, from `offset` of the storage of `memory`."""
    start = int(full.storage_offset()) + first
    for size, into, source in copies:
        place = full.as_strided(size, into.strides, start + into.offset)
        place.copy_(memory.as_strided(size, source.strides, offset + source.offset))
