"""How one rank's shard and full Hugging Face tensors share elements: a list of rectangular regions.

Load copies each region from the Hugging Face tensor into the shard; export copies the same region back. One
description serves both ways, so they cannot disagree; the regions of all TP ranks tile each Hugging Face tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeref.bridge import gated_delta_net
from moeref.families import HFPattern, Model, ParamMapping

Index = tuple[int | slice, ...]


class BridgeError(ValueError):
    """A tensor, name or layout that cannot be bridged; the message names it."""


@dataclass(frozen=True)
class CopyRegion:
    """`shard[shard_index] = hf_tensors[tensor][hf_index]`, its last two axes swapped if `transposed`.

    Indices are plain ints and slices, one per dimension; only `hf_index` has steps.
    """

    tensor: int  # its number among the Hugging Face tensors of the parameter
    hf_index: Index
    shard_index: Index
    transposed: bool = False


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


def shard_regions(
    model: Model,
    mapping: ParamMapping,
    rank: int,
    parts: int,
    *,
    padded: int,
    expert: int | None = None,
    fused: bool = False,
) -> tuple[tuple[int, ...], tuple[CopyRegion, ...]]:
    """Shape and regions of shard `rank` of `parts` (TP, or ETP for experts) of one parameter.

    padded: rows of the padded vocabulary. expert: the global expert whose parameter this is. fused: the Hugging Face
    side is `mapping.fused`. Raises BridgeError where a size does not divide.
    """
    tensors, dims = (mapping.fused,) if fused and mapping.fused else mapping.hf, model.dims
    first, what = tensors[0], f"{model.family}: {mapping.megatron}"
    lead: Index = () if expert is None or "{expert}" in first.name else (expert,)
    full = tuple(dims[d] for d in first.dims[len(lead) :])[:: -1 if first.transposed else 1]
    tail = tuple(slice(0, n) for n in full[1:])

    def region(source: int, rows: Index, local: Index) -> CopyRegion:
        return CopyRegion(source, (*lead, *(rows[::-1] if first.transposed else rows)), local, first.transposed)

    if mapping.sharding == "replicate":
        whole = tuple(slice(0, n) for n in full)
        return full, (region(0, whole, whole),)
    if mapping.sharding == "vocab":
        rows = _share(padded, rank, parts, f"{what}: padded vocabulary")
        real = max(0, min(rows.stop, full[0]) - rows.start)
        # An alias holds the same rows once more.
        sources = range(len(mapping.hf) if real else 0)
        same = tuple(region(i, (_rows(rows.start, real), *tail), (_rows(0, real), *tail)) for i in sources)
        return (rows.stop - rows.start, *full[1:]), same
    if mapping.sharding == "column":
        share = _share(full[0], rank, parts, f"{what} dim 0")
        size = share.stop - share.start
        return (size, *full[1:]), (region(0, (share, *tail), (_rows(0, size), *tail)),)
    if mapping.sharding == "row":
        share = _share(full[1], rank, parts, f"{what} dim 1")
        size, all_rows = share.stop - share.start, slice(0, full[0])
        return (full[0], size), (region(0, (all_rows, share), (all_rows, _rows(0, size))),)
    if mapping.sharding == "gate_up":
        width = full[0] if len(tensors) == 2 else full[0] // 2
        share = _share(width, rank, parts, f"{what}: gate and up rows")
        size = share.stop - share.start
        halves = [_half(tensors, part, share, width) for part in range(2)]
        regions = tuple(
            region(source, (rows, *tail), (_rows(part * size, size), *tail))
            for part, (source, rows) in enumerate(halves)
        )
        return (2 * size, *full[1:]), regions
    if mapping.sharding == "qkv":
        return _qkv_regions(model, rank, parts, tail, full[1:], what)
    return _stacked(_runs(model, mapping, rank, parts, what), tail, full[1:])


def _half(tensors: tuple[HFPattern, ...], part: int, share: slice, width: int) -> tuple[int, slice]:
    """(source, rows) of `share` in gate (part 0) or up (1): a tensor of its own, every second row of one, or a half."""
    if len(tensors) == 2:
        return part, share
    if tensors[0].interleaved:
        return 0, slice(2 * share.start + part, 2 * share.stop, 2)
    return 0, slice(part * width + share.start, part * width + share.stop)


def _runs(model: Model, mapping: ParamMapping, rank: int, parts: int, what: str) -> Iterable[gated_delta_net.Run]:
    """Runs of rows for the rank's share of KV groups or key heads."""
    if mapping.sharding == "gated_qkv":
        share = _share(model.kv_groups, rank, parts, f"{what}: KV groups (more TP ranks than groups is not mapped)")
        return gated_delta_net.gated_qkv(model, range(share.start, share.stop))
    if model.gated_delta_net is None:
        raise BridgeError(f"{what}: {mapping.sharding} rows need a gated delta net")
    share = _share(model.gated_delta_net.key_heads, rank, parts, f"{what}: key heads")
    runs = gated_delta_net.gdn_in_proj if mapping.sharding == "gdn_in_proj" else gated_delta_net.gdn_conv1d
    return runs(model.gated_delta_net, range(share.start, share.stop))


def _stacked(
    runs: Iterable[gated_delta_net.Run], tail: Index, rest: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[CopyRegion, ...]]:
    """Runs of rows, one below the other."""
    regions: list[CopyRegion] = []
    at = 0
    for source, start, count in runs:
        regions.append(CopyRegion(source, (_rows(start, count), *tail), (_rows(at, count), *tail)))
        at += count
    return (at, *rest), tuple(regions)


def _qkv_regions(
    model: Model, rank: int, parts: int, tail: Index, rest: tuple[int, ...], what: str
) -> tuple[tuple[int, ...], tuple[CopyRegion, ...]]:
    """Per KV group [its q heads | k | v]; TP takes contiguous groups (megatron-core's SelfAttention)."""
    d, per_group = model.head_dim, model.heads // model.kv_groups
    groups = _share(model.kv_groups, rank, parts, f"{what}: KV groups (more TP ranks than groups is not mapped)")
    regions: list[CopyRegion] = []
    at = 0
    for group in range(groups.start, groups.stop):
        for source, (start, count) in enumerate(
            ((group * per_group * d, per_group * d), (group * d, d), (group * d, d))
        ):
            regions.append(CopyRegion(source, (_rows(start, count), *tail), (_rows(at, count), *tail)))
            at += count
    return (at, *rest), tuple(regions)


def bounding(regions: tuple[CopyRegion, ...], source: int) -> Index:
    """The smallest index of Hugging Face tensor `source` that holds all its regions: what a rank has to read."""
    mine = [r.hf_index for r in regions if r.tensor == source]
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
