"""How one rank's shard and full Hugging Face tensors share elements: a list of rectangular blocks.

Load copies each block from the Hugging Face tensor into the shard; export copies the same block back. One
description serves both ways, so they cannot drift apart; the blocks of all TP ranks tile each Hugging Face tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeref.bridge import delta
from moeref.families import Model, Row, Tensor

Index = tuple[int | slice, ...]


class BridgeError(ValueError):
    """A tensor, name or layout that cannot be bridged; the message names it."""


@dataclass(frozen=True)
class Block:
    """`shard[local] = hf_tensors[source][remote]`, its last two axes swapped if `turned`.

    Indices are plain ints and slices, one per dimension; only `remote` has steps.
    """

    source: int
    remote: Index
    local: Index
    turned: bool = False


def _rows(start: int, count: int) -> slice:
    return slice(start, start + count)


def _share(size: int, rank: int, parts: int, what: str) -> slice:
    if size % parts:
        raise BridgeError(f"{what}: {size} does not divide over {parts} ranks")
    return _rows(rank * (size // parts), size // parts)


def padded_vocab(model: Model, tp: int, divisible_by: int) -> int:
    """Rows of the padded vocabulary: the next multiple of divisible_by · TP, as Megatron-LM pads it."""
    unit = divisible_by * tp
    return -(-model.vocab // unit) * unit


def shard_blocks(
    model: Model, row: Row, rank: int, parts: int, *, padded: int, expert: int | None = None, fused: bool = False
) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """Shape and blocks of shard `rank` of `parts` (TP for dense rows, ETP for experts) of one row.

    padded: rows of the padded vocabulary. expert: global expert whose row this is. fused: the Hugging Face side is
    `row.fused`. Raises BridgeError where a size does not divide.
    """
    tensors, dims = (row.fused,) if fused and row.fused else row.hf, model.dims
    first, what = tensors[0], f"{model.family}: {row.megatron}"
    lead: Index = () if expert is None or "{expert}" in first.name else (expert,)
    full = tuple(dims[d] for d in first.dims[len(lead) :])[:: -1 if first.turned else 1]
    tail = tuple(slice(0, n) for n in full[1:])

    def block(source: int, rows: Index, local: Index) -> Block:
        return Block(source, (*lead, *(rows[::-1] if first.turned else rows)), local, first.turned)

    if row.how == "replicate":
        whole = tuple(slice(0, n) for n in full)
        return full, (block(0, whole, whole),)
    if row.how == "vocab":
        rows = _share(padded, rank, parts, f"{what}: padded vocabulary")
        real = max(0, min(rows.stop, full[0]) - rows.start)
        # An alias holds the same rows once more.
        sources = range(len(row.hf) if real else 0)
        same = tuple(block(i, (_rows(rows.start, real), *tail), (_rows(0, real), *tail)) for i in sources)
        return (rows.stop - rows.start, *full[1:]), same
    if row.how == "column":
        share = _share(full[0], rank, parts, f"{what} dim 0")
        size = share.stop - share.start
        return (size, *full[1:]), (block(0, (share, *tail), (_rows(0, size), *tail)),)
    if row.how == "row":
        share = _share(full[1], rank, parts, f"{what} dim 1")
        size, all_rows = share.stop - share.start, slice(0, full[0])
        return (full[0], size), (block(0, (all_rows, share), (all_rows, _rows(0, size))),)
    if row.how == "gate_up":
        width = full[0] if len(tensors) == 2 else full[0] // 2
        share = _share(width, rank, parts, f"{what}: gate and up rows")
        size = share.stop - share.start
        halves = [_half(tensors, part, share, width) for part in range(2)]
        blocks = tuple(
            block(source, (rows, *tail), (_rows(part * size, size), *tail))
            for part, (source, rows) in enumerate(halves)
        )
        return (2 * size, *full[1:]), blocks
    if row.how == "qkv":
        return _qkv_blocks(model, rank, parts, tail, full[1:], what)
    return _stacked(_runs(model, row, rank, parts, what), tail, full[1:])


def _half(tensors: tuple[Tensor, ...], part: int, share: slice, width: int) -> tuple[int, slice]:
    """(source, rows) of `share` in gate (part 0) or up (1): a tensor of its own, every second row of one, or a half."""
    if len(tensors) == 2:
        return part, share
    if tensors[0].paired:
        return 0, slice(2 * share.start + part, 2 * share.stop, 2)
    return 0, slice(part * width + share.start, part * width + share.stop)


def _runs(model: Model, row: Row, rank: int, parts: int, what: str) -> Iterable[delta.Run]:
    """Runs of rows for the rank's share of KV groups or key heads."""
    if row.how == "gated_qkv":
        share = _share(model.kv_groups, rank, parts, f"{what}: KV groups (more TP ranks than groups is not mapped)")
        return delta.gated_qkv(model, range(share.start, share.stop))
    if model.delta is None:
        raise BridgeError(f"{what}: {row.how} rows need a gated delta net")
    share = _share(model.delta.key_heads, rank, parts, f"{what}: key heads")
    runs = delta.delta_in if row.how == "delta_in" else delta.delta_conv
    return runs(model.delta, range(share.start, share.stop))


def _stacked(
    runs: Iterable[delta.Run], tail: Index, rest: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """Runs of rows, one below the other."""
    blocks: list[Block] = []
    at = 0
    for source, start, count in runs:
        blocks.append(Block(source, (_rows(start, count), *tail), (_rows(at, count), *tail)))
        at += count
    return (at, *rest), tuple(blocks)


def _qkv_blocks(
    model: Model, rank: int, parts: int, tail: Index, rest: tuple[int, ...], what: str
) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """Per KV group [its q heads | k | v]; TP takes contiguous groups (megatron-core's SelfAttention)."""
    d, per_group = model.head_dim, model.heads // model.kv_groups
    groups = _share(model.kv_groups, rank, parts, f"{what}: KV groups (more TP ranks than groups is not mapped)")
    blocks: list[Block] = []
    at = 0
    for group in range(groups.start, groups.stop):
        for source, (start, count) in enumerate(
            ((group * per_group * d, per_group * d), (group * d, d), (group * d, d))
        ):
            blocks.append(Block(source, (_rows(start, count), *tail), (_rows(at, count), *tail)))
            at += count
    return (at, *rest), tuple(blocks)


def bounding(blocks: tuple[Block, ...], source: int) -> Index:
    """The smallest index of Hugging Face tensor `source` that holds all its blocks: what a rank has to read."""
    mine = [b.remote for b in blocks if b.source == source]
    out: list[int | slice] = []
    for axis in zip(*mine, strict=True):
        if all(isinstance(i, int) for i in axis):
            first = min(i for i in axis if isinstance(i, int))
            out.append(first)
        else:
            parts = [i for i in axis if isinstance(i, slice)]
            out.append(slice(min(i.start for i in parts), max(i.stop for i in parts)))
    return tuple(out)


def relative(remote: Index, base: Index) -> Index:
    """`remote` as an index into the tensor that indexing with `base` gave (integer axes are gone there)."""
    return tuple(
        slice(r.start - b.start, r.stop - b.start, r.step)
        for r, b in zip(remote, base, strict=True)
        if isinstance(r, slice) and isinstance(b, slice)
    )
