"""How one rank's shard and full Hugging Face tensors share elements: a list of rectangular regions.

Load copies each region from the Hugging Face tensor into the shard; export copies the same region back. One
description serves both ways, so they cannot disagree; the regions of all TP ranks tile each Hugging Face tensor once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeref.bridge import gated_delta_net
from moeref.families import HFPattern, Model, ParamMapping
from moeref.families.mapping import Sharding
from moeref.families.model import GatedDeltaNet

Index = tuple[int | slice, ...]
#: The number of a Hugging Face tensor among those of its parameter, and rows of it.
TensorRows = tuple[int, slice]


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


class Shard(NamedTuple):
    """The shape of one rank's shard of a parameter, and where its elements come from."""

    shape: tuple[int, ...]
    regions: tuple[CopyRegion, ...]


def _rows(start: int, count: int) -> slice:
    return slice(start, start + count)


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
) -> Shard:
    """Shard `rank` of `parts` of one parameter; parts are TP ranks, or ETP ranks for an expert.

    padded: rows of the padded vocabulary. expert: the global expert. fused: the Hugging Face side is `mapping.fused`.
    Raises BridgeError where a size does not divide.
    """
    tensors = (mapping.fused,) if fused and mapping.fused else mapping.hf
    cut = _Cut(model, mapping, tensors, rank, parts, expert)
    if mapping.sharding == "vocab":
        return cut.vocab(padded)
    if mapping.sharding == "row":
        return cut.columns()
    return cut.stacked(_ROWS[mapping.sharding](cut))


@dataclass(frozen=True)
class _Cut:
    """One shard to describe: part `rank` of `parts` of a parameter that lies in `tensors`."""

    model: Model
    mapping: ParamMapping
    tensors: tuple[HFPattern, ...]
    rank: int
    parts: int
    expert: int | None

    @property
    def _lead(self) -> Index:
        """Selects the expert in a tensor that holds all experts."""
        return () if self.expert is None or "{expert}" in self.tensors[0].name else (self.expert,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first tensor, or of one expert in it, as Megatron orders the axes."""
        first = self.tensors[0]
        shape = tuple(self.model.dims[d] for d in first.dims[len(self._lead) :])
        return shape[::-1] if first.transposed else shape

    def error(self, text: str) -> BridgeError:
        """The error `text` for this parameter."""
        return BridgeError(f"{self.model.family}: {self.mapping.megatron}{text}")

    def share(self, size: int, name: str) -> slice:
        """The rank's part of `size` rows, columns, groups or heads, all parts equal."""
        if size % self.parts:
            raise self.error(f"{name}: {size} does not divide over {self.parts} ranks")
        return _rows(self.rank * (size // self.parts), size // self.parts)

    def region(self, tensor: int, index: Index, shard_index: Index) -> CopyRegion:
        """The region of a Hugging Face tensor that `index`, in Megatron's order of axes, selects."""
        transposed = self.tensors[0].transposed
        return CopyRegion(tensor, (*self._lead, *(index[::-1] if transposed else index)), shard_index, transposed)

    def rows(self, tensor: int, rows: slice, shard_rows: slice) -> CopyRegion:
        """The region of whole rows."""
        rest = tuple(slice(0, n) for n in self.shape[1:])
        return self.region(tensor, (rows, *rest), (shard_rows, *rest))

    def stacked(self, pieces: Iterable[TensorRows]) -> Shard:
        """The shard that holds `pieces` one below the other."""
        regions: list[CopyRegion] = []
        at = 0
        for tensor, rows in pieces:
            count = len(range(rows.start, rows.stop, rows.step or 1))
            regions.append(self.rows(tensor, rows, _rows(at, count)))
            at += count
        return Shard((at, *self.shape[1:]), tuple(regions))

    def columns(self) -> Shard:
        """The rank's columns of a row-parallel linear."""
        rows, share = slice(0, self.shape[0]), self.share(self.shape[1], " dim 1")
        size = share.stop - share.start
        return Shard((self.shape[0], size), (self.region(0, (rows, share), (rows, _rows(0, size))),))

    def vocab(self, padded: int) -> Shard:
        """The rank's rows of a vocabulary of `padded` rows; a rank of padding alone has no region.

        Copies of the tensor in MTP layers have the same region of the shard.
        """
        rows = self.share(padded, ": padded vocabulary")
        real = max(0, min(rows.stop, self.shape[0]) - rows.start)
        tensors = range(len(self.tensors) if real else 0)
        regions = tuple(self.rows(i, _rows(rows.start, real), _rows(0, real)) for i in tensors)
        return Shard((rows.stop - rows.start, *self.shape[1:]), regions)


def _replicate(cut: _Cut) -> Iterable[TensorRows]:
    return [(0, slice(0, cut.shape[0]))]


def _column(cut: _Cut) -> Iterable[TensorRows]:
    return [(0, cut.share(cut.shape[0], " dim 0"))]


def _gate_up(cut: _Cut) -> Iterable[TensorRows]:
    """Gate, then up: two tensors, every second row of one, or its two halves."""
    two = len(cut.tensors) == 2
    width = cut.shape[0] if two else cut.shape[0] // 2
    share = cut.share(width, ": gate and up rows")
    if two:
        return [(0, share), (1, share)]
    if cut.tensors[0].interleaved:
        return [(0, slice(2 * share.start + part, 2 * share.stop, 2)) for part in range(2)]
    return [(0, slice(start + share.start, start + share.stop)) for start in (0, width)]


def _qkv(cut: _Cut) -> Iterable[TensorRows]:
    """Per KV group its q heads, k, v."""
    d = cut.model.head_dim
    q = d * (cut.model.heads // cut.model.kv_groups)
    return _of_groups(
        cut, q + 2 * d, lambda group: [(tensor, group * rows, rows) for tensor, rows in enumerate((q, d, d))]
    )


def _gated_qkv(cut: _Cut) -> Iterable[TensorRows]:
    model = cut.model
    rows = 2 * model.head_dim * (model.heads // model.kv_groups + 1)
    return _of_groups(cut, rows, lambda group: gated_delta_net.gated_qkv(model, range(group, group + 1)))


def _of_groups(cut: _Cut, rows: int, runs: Callable[[int], Iterable[gated_delta_net.Run]]) -> Iterable[TensorRows]:
    """The rank's rows of KV groups one below the other, each of `rows` rows that `runs` lists.

    TP takes contiguous rows. With more ranks than groups a rank has a part of a group's, wherever that begins: no row
    is on two ranks, as megatron-core's SelfAttention gathers the outputs and picks its heads from them.
    """
    groups = cut.model.kv_groups
    if groups % cut.parts and cut.parts % groups:
        raise cut.error(f": {groups} KV groups are neither a multiple nor a divisor of {cut.parts} ranks")
    share = cut.share(groups * rows, ": rows of KV groups")
    at = share.start // rows * rows  # of the run's first row among the rows of all groups
    for group in range(share.start // rows, -(-share.stop // rows)):
        for tensor, start, count in runs(group):
            first, last = max(share.start, at), min(share.stop, at + count)
            if first < last:
                yield tensor, _rows(start + first - at, last - first)
            at += count


def _gdn_in_proj(cut: _Cut) -> Iterable[TensorRows]:
    """q, k, v, z, b, a of two tensors that have them by key head, or of four that have them one after the other."""
    runs = gated_delta_net.gdn_in_proj if len(cut.tensors) == 2 else gated_delta_net.gdn_in_projs
    return _slices(runs(*_key_heads(cut)))


def _gdn_conv1d(cut: _Cut) -> Iterable[TensorRows]:
    return _slices(gated_delta_net.gdn_conv1d(*_key_heads(cut)))


def _key_heads(cut: _Cut) -> tuple[GatedDeltaNet, range]:
    """The net's sizes and the rank's key heads."""
    net = cut.model.gated_delta_net
    if net is None:
        raise cut.error(f": {cut.mapping.sharding} needs a gated delta net")
    share = cut.share(net.key_heads, ": key heads")
    return net, range(share.start, share.stop)


def _slices(runs: Iterable[gated_delta_net.Run]) -> Iterable[TensorRows]:
    return ((tensor, _rows(start, count)) for tensor, start, count in runs)


#: The rows of a shard, by `ParamMapping.sharding`, for every kind that splits whole rows.
_ROWS: dict[Sharding, Callable[[_Cut], Iterable[TensorRows]]] = {
    "replicate": _replicate,
    "column": _column,
    "gate_up": _gate_up,
    "qkv": _qkv,
    "gated_qkv": _gated_qkv,
    "gdn_in_proj": _gdn_in_proj,
    "gdn_conv1d": _gdn_conv1d,
}


def bounding(regions: tuple[CopyRegion, ...], tensor: int) -> Index:
    """The smallest index of Hugging Face tensor `tensor` that covers all its regions: what a rank has to read."""
    mine = [r.hf_index for r in regions if r.tensor == tensor]
    out: list[int | slice] = []
    for axis in zip(*mine, strict=True):
        if all(isinstance(i, int) for i in axis):
            first = min(i for i in axis if isinstance(i, int))
            out.append(first)
        else:
            parts = [i for i in axis if isinstance(i, slice)]
            out.append(slice(min(i.start for i in parts), max(i.stop for i in parts)))
    return tuple(out)


def ranges(shape: Sequence[int], index: Index) -> list[range]:
    """What an index takes of each axis that it has a slice of."""
    return [range(*of.indices(size)) for size, of in zip(shape, index, strict=True) if isinstance(of, slice)]


def relative(index: Index, base: Index) -> Index:
    """`index` as an index into `tensor[base]`, which lacks the axes that `base` indexes by a number."""
    return tuple(
        slice(r.start - b.start, r.stop - b.start, r.step)
        for r, b in zip(index, base, strict=True)
        if isinstance(r, slice) and isinstance(b, slice)
    )
