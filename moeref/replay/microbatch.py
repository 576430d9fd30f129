"""The routes of a microbatch: samples packed into one sequence or side by side in a batch, and each rank's part of it.

Each step is a pure function with its inverse next to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from moeref.dispatcher.padding import Plan, round_up
from moeref.layout import Layout
from moeref.layout.sequence import contiguous, restored, zigzag
from moeref.replay.align import pad, select_layers, stage_layers, unpad
from moeref.replay.engine_formats import Spec
from moeref.replay.routes import PAD, RouteError, Routes, concat, spread_experts

CPRule = Literal["zigzag", "contiguous"]
Side = Literal["left", "right"]


@dataclass(frozen=True)
class MicrobatchRoutes:
    """The routes of a microbatch in the order in which routers see its tokens, and where each sample is.

    A router's input is [S, B, H], and row s·B + b is token s of column b; B is `routes.batch`. `cu_seqlens` cuts S into
    sequences: packed samples follow one another in one column, batched samples have a column each. `starts` is the
    position of each sample's first row in its rollout.
    """

    routes: Routes
    cu_seqlens: tuple[int, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise RouteError unless cu_seqlens ascends from 0 to S, with a place for each sample."""
        ends, columns = self.cu_seqlens, self.routes.batch
        if not ends or ends[0] != 0 or list(ends) != sorted(ends) or (len(ends) - 1) * columns != len(self.starts):
            raise RouteError(f"cu_seqlens {list(ends)} of {len(self.starts)} samples; expected 0 and the end of each")
        if ends[-1] * columns != self.routes.tokens:
            raise RouteError(f"cu_seqlens end at {ends[-1]}, but there are {self.routes.tokens} rows")

    def rows(self, sample: int) -> npt.NDArray[np.intp]:
        """The rows of one sample with its padding, in the order of its tokens."""
        sequence, column = divmod(sample, self.routes.batch)
        return np.arange(self.cu_seqlens[sequence], self.cu_seqlens[sequence + 1]) * self.routes.batch + column

    def samples(self) -> list[Routes]:
        """The samples without padding. Inverse of `packed` and `batched`."""
        parts = [self.routes.take(self.rows(i), start=start) for i, start in enumerate(self.starts)]
        return [unpad(replace(part, batch=1)) for part in parts]


def packed(samples: Sequence[Routes], plan: Plan | None = None, *, total: int | None = None) -> MicrobatchRoutes:
    """Samples one after the other in one sequence (THD), padded on the right as `plan` says.

    plan: of `moeref.dispatcher.padding.plan`; None pads nothing. What it adds after the last sample belongs to that
    sample's padding, as in `cu_seqlens_padded`.
    total: the padded length of the sequence, where `Plan.group` asks for more than this rank needs.

    Raises RouteError for no samples, for batched ones, and for a total that is too short or breaks the plan's multiple;
    PaddingError as `Plan.pack` does.
    """
    _check_samples(samples)
    fit = (plan or Plan(())).pack([sample.tokens for sample in samples])
    if total is not None and (total < fit.total or total != round_up(total, (plan or Plan(())).multiple)):
        raise RouteError(f"total={total}: the plan pads these samples to {fit.total} rows or a multiple that it keeps")
    lengths = [*fit.samples[:-1], (fit.total if total is None else total) - sum(fit.samples[:-1])]
    whole = concat([pad(s, right=n - s.tokens) for s, n in zip(samples, lengths, strict=True)])
    return _microbatch(whole, [0, *itertools.accumulate(lengths)], samples)


def batched(
    samples: Sequence[Routes], plan: Plan | None = None, *, length: int | None = None, side: Side = "right"
) -> MicrobatchRoutes:
    """Samples side by side in one batch [S, B], each padded to the same length.

    plan: of `moeref.dispatcher.padding.plan`; its padded length of the longest sample is S.
    length: S, where it is fixed otherwise. side: where the padding goes.

    Raises RouteError for no samples, for batched ones, and for a sample longer than `length`; PaddingError as
    `Plan.padded` does.
    """
    _check_samples(samples)
    longest = max(sample.tokens for sample in samples)
    size = (plan or Plan(())).padded(longest) if length is None else length
    if longest > size:
        raise RouteError(f"a sample of {longest} rows does not fit length={length}")
    parts = [pad(s, **{side: size - s.tokens}) for s in samples]
    by_sample = np.arange(size * len(parts)).reshape(len(parts), size)
    whole = replace(concat(parts).take(by_sample.T.reshape(-1)), batch=len(parts))
    return _microbatch(whole, [0, size], samples)


def _check_samples(samples: Sequence[Routes]) -> None:
    if not samples:
        raise RouteError("no samples; a microbatch has at least one")
    for number, sample in enumerate(samples):
        if sample.batch != 1:
            raise RouteError(f"sample {number} has the rows of {sample.batch} samples in turn; give each sample alone")


def _microbatch(whole: Routes, cu_seqlens: Sequence[int], samples: Sequence[Routes]) -> MicrobatchRoutes:
    pads = np.flatnonzero(whole.kind_T == PAD)
    if pads.size:  # spread the padding of all samples together; each sample alone would start at expert 0
        whole.idx_TLK[pads] = spread_experts(pads.size, len(whole.layers), whole.top_k, whole.experts)
    return MicrobatchRoutes(replace(whole, start=0), tuple(cu_seqlens), tuple(s.start for s in samples))


def rank_rows(
    cu_seqlens: Sequence[int], *, cp: int = 1, cp_rank: int = 0, tp: int = 1, tp_rank: int = 0, rule: CPRule = "zigzag"
) -> npt.NDArray[np.intp]:
    """Which positions along S a rank holds, in the rank's order.

    Each sequence is split over CP by `rule`. The positions of a CP rank are then split over TP into contiguous parts
    (sequence parallelism). Raises LayoutError for a sequence that does not divide.
    """
    cut = zigzag if rule == "zigzag" else contiguous
    parts = [
        begin + np.asarray(cut(end - begin, cp, cp_rank), np.intp) for begin, end in itertools.pairwise(cu_seqlens)
    ]
    mine = np.concatenate(parts) if parts else np.zeros(0, np.intp)
    return mine[np.asarray(contiguous(len(mine), tp, tp_rank), np.intp)] if tp > 1 else mine


def shard_to_rank(batch: MicrobatchRoutes, layout: Layout, rank: int, *, rule: CPRule = "zigzag") -> Routes:
    """The rows that the routers of `rank` see: its CP part and, with tp > 1, its sequence-parallel part of that."""
    if isinstance(batch, Routes):
        raise RouteError("routes of one sample have no place in a microbatch yet: give packed([...]) or batched([...])")
    at = layout.coords(rank)
    where = rank_rows(batch.cu_seqlens, cp=layout.cp, cp_rank=at.cp, tp=layout.tp, tp_rank=at.tp, rule=rule)
    return batch.routes.take(_of_columns(where, batch.routes.batch))


def _of_columns(positions_S: npt.NDArray[np.intp], columns: int) -> npt.NDArray[np.intp]:
    """The rows of these positions in every column."""
    return (positions_S[:, None] * columns + np.arange(columns)).reshape(-1)


def gather_ranks(
    parts: Mapping[tuple[int, int], Routes], cu_seqlens: Sequence[int], layout: Layout, *, rule: CPRule = "zigzag"
) -> Routes:
    """The rows of the whole batch, from the parts of all (cp, tp) ranks. Inverse of `shard_to_rank`."""
    keys = [(cp, tp) for cp in range(layout.cp) for tp in range(layout.tp)]
    if parts.keys() != set(keys):
        raise RouteError(f"parts of ranks (cp, tp) {sorted(parts)}, expected {keys}")
    columns = parts[keys[0]].batch
    where = [
        _of_columns(rank_rows(cu_seqlens, cp=layout.cp, cp_rank=cp, tp=layout.tp, tp_rank=tp, rule=rule), columns)
        for cp, tp in keys
    ]
    for key, mine in zip(keys, where, strict=True):
        if parts[key].tokens != len(mine):
            raise RouteError(f"rank (cp, tp) {key} has {parts[key].tokens} rows, expected {len(mine)}")
    return concat([parts[key] for key in keys]).take(np.asarray(restored([list(map(int, w)) for w in where]), np.intp))


def marked(routes: Routes, layers: Sequence[int]) -> npt.NDArray[np.int32]:
    """The experts [L, T, K] of `layers` as int32, with -1 where a route is missing; PAD rows have their spread experts.

    Raises RouteError for a layer without routes.
    """
    chosen = select_layers(routes, layers)
    experts_LTK = np.ascontiguousarray(chosen.idx_TLK.transpose(1, 0, 2), np.int32)
    experts_LTK[chosen.missing_TL.T] = -1
    return experts_LTK


def targets(
    batch: MicrobatchRoutes, layout: Layout, rank: int, spec: Spec | None = None, *, rule: CPRule = "zigzag"
) -> list[dict[int, npt.NDArray[np.int32]]]:
    """What the routers of `rank` replay, for a framework with its own controller: for each chunk [T, K] by layer.

    Rows are in the order of the router's input, after context and sequence parallelism; layers are numbered over the
    whole decoder, in the order in which they run. -1 marks routes that are missing: megatron-core's RouterReplay cannot
    take them, so give these rows the router's own top-k, as `moeref.megatron.replay.replaying` does.

    spec: the model's, for routes that were not read with one.

    Raises RouteError for routes without a layer of the rank or of an unknown number of layers, LayoutError for
    sequences that do not divide.
    """
    mine = shard_to_rank(batch, layout, rank, rule=rule)
    depth = mine.depth if spec is None else len(spec.moe_layers)
    if depth is None:
        raise RouteError("routes of an unknown number of decoder layers, on which the stages depend; pass spec=")
    moe_layers = [layer in mine.layers for layer in range(depth)] if spec is None else spec.moe_layers
    pp = layout.coords(rank).pp
    numbers = [stage_layers(layout, moe_layers, pp, vp) for vp in range(layout.vpp)]
    return [dict(zip(layers, marked(mine, layers), strict=True)) for layers in numbers]
