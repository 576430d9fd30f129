"""Reference dispatch and combine in plain torch over process groups: all-gather and all-to-all.

Shapes: T rows of this rank, H hidden, E experts in total, L experts of this rank, R rows that reach them. Both
dispatchers send every expert its rows and weights, and sum the experts' outputs into the rows they came from. As in
megatron-core, the expert applies the weights. With expert tensor parallelism every rank of the etp group gets all rows
of its experts and returns a partial sum. Rows have the order of megatron-core's dispatchers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeref.dispatcher.collectives import Group, counts, exchange, gather, rank, reduce_scatter, size
from moeref.dispatcher.setup import DispatcherError


@dataclass(frozen=True)
class Groups:
    """Process groups of the experts; None is a group of one.

    `etp_ep` is the product of the two, etp fastest (megatron-core's `tp_ep` group). Raises DispatcherError otherwise.
    """

    ep: Group = None
    etp: Group = None
    etp_ep: Group = None

    def __post_init__(self) -> None:
        if size(self.etp_ep) != size(self.ep) * size(self.etp):
            raise DispatcherError(
                f"the etp_ep group has {size(self.etp_ep)} ranks, etp {size(self.etp)} and ep {size(self.ep)}"
            )
        if rank(self.etp_ep) != rank(self.ep) * size(self.etp) + rank(self.etp):
            raise DispatcherError("the etp_ep group must run over etp first, then over ep")

    def experts(self, experts: int) -> range:
        """The experts of this rank. Raises DispatcherError if they do not divide over ep."""
        if experts % size(self.ep):
            raise DispatcherError(f"{experts} experts do not divide over ep={size(self.ep)}")
        local = experts // size(self.ep)
        return range(rank(self.ep) * local, (rank(self.ep) + 1) * local)


@dataclass(frozen=True)
class Dispatched:
    """Dispatched rows: `rows_RH` and `weights_R` in the order of experts, `counts_L` rows per expert (int64).

    `combine` takes the experts' outputs (R, H) and returns the sum over experts of every row of this rank (T, H).
    """

    rows_RH: torch.Tensor
    weights_R: torch.Tensor
    counts_L: torch.Tensor
    combine: Callable[[torch.Tensor], torch.Tensor]


def routing_map(experts_TK: torch.Tensor, experts: int) -> torch.Tensor:
    """Boolean (T, E) from expert indices (T, k).

    Raises DispatcherError for an index out of range, and for an index that occurs twice in a row: the row would reach
    fewer than k experts, and dropless dispatch assumes T·k rows.
    """
    if experts_TK.numel() and not 0 <= int(experts_TK.min()) <= int(experts_TK.max()) < experts:
        raise DispatcherError(f"expert indices {int(experts_TK.min())}…{int(experts_TK.max())} of {experts} experts")
    found = torch.zeros(experts_TK.shape[0], experts, dtype=torch.bool, device=experts_TK.device)
    found.scatter_(1, experts_TK.long(), True)
    short = found.sum(1) < experts_TK.shape[1]
    if short.any():
        row = int(short.nonzero()[0, 0])
        raise DispatcherError(f"row {row} names an expert twice: {experts_TK[row].tolist()}")
    return found


def allgather(rows_TH: torch.Tensor, weights_TE: torch.Tensor, map_TE: torch.Tensor, groups: Groups) -> Dispatched:
    """Every rank of the etp·ep group gets all rows and keeps those of its experts; outputs are reduce-scattered.

    Unlike in megatron-core, T may differ between ranks. Raises DispatcherError for tensors whose shapes or dtypes do
    not match.
    """
    local = _check(rows_TH, weights_TE, map_TE, groups)
    of_rank = counts(torch.tensor(rows_TH.shape[0], device=rows_TH.device), groups.etp_ep).tolist()
    all_rows = gather(rows_TH, of_rank, groups.etp_ep)
    all_weights = gather(weights_TE, of_rank, groups.etp_ep)[:, local.start : local.stop]
    chosen = gather(map_TE.to(torch.uint8), of_rank, groups.etp_ep)[:, local.start : local.stop].bool()
    source = chosen.T.nonzero()[:, 1]

    def combine(outputs_RH: torch.Tensor) -> torch.Tensor:
        everywhere = outputs_RH.new_zeros(all_rows.shape).index_add(0, source, outputs_RH)
        return reduce_scatter(everywhere, of_rank, groups.etp_ep)

    return Dispatched(all_rows[source], all_weights.T[chosen.T], chosen.sum(0), combine)


def alltoall(rows_TH: torch.Tensor, weights_TE: torch.Tensor, map_TE: torch.Tensor, groups: Groups) -> Dispatched:
    """Rows go to the ep rank of their expert, then to all ranks of its etp group; outputs return the same way.

    T may differ between ranks and may be 0; experts may get no rows. Raises DispatcherError for tensors whose shapes or
    dtypes do not match.
    """
    local = _check(rows_TH, weights_TE, map_TE, groups)
    ep, etp = size(groups.ep), size(groups.etp)
    source = map_TE.T.nonzero()[:, 1]
    every = counts(map_TE.sum(0), groups.etp_ep).reshape(ep, etp, -1)[:, :, local.start : local.stop]
    send = map_TE.sum(0).reshape(ep, -1).sum(1).tolist()
    receive = every[:, rank(groups.etp)].sum(1).tolist()
    of_etp = every.sum((0, 2)).tolist()
    # Chunks arrive in the order (etp, ep, expert); experts need them in the order (expert, etp, ep).
    chunks = every.transpose(0, 1).reshape(etp * ep, len(local))
    order = _by_expert(chunks)

    def move(rows: torch.Tensor) -> torch.Tensor:
        return gather(exchange(rows, send, receive, groups.ep), of_etp, groups.etp)[order]

    def combine(outputs_RH: torch.Tensor) -> torch.Tensor:
        arrived = torch.empty_like(outputs_RH).index_copy(0, order, outputs_RH)
        home = exchange(reduce_scatter(arrived, of_etp, groups.etp), receive, send, groups.ep)
        return home.new_zeros(rows_TH.shape).index_add(0, source, home)

    return Dispatched(move(rows_TH[source]), move(weights_TE.T[map_TE.T]), chunks.sum(0), combine)


def _by_expert(chunks_SL: torch.Tensor) -> torch.Tensor:
    """Row indices that reorder chunks (source, expert) of the given sizes to (expert, source)."""
    sizes = chunks_SL.flatten()
    starts = (sizes.cumsum(0) - sizes).reshape(chunks_SL.shape)
    pieces = [
        torch.arange(int(start), int(start) + int(length), device=chunks_SL.device)
        for starts_S, lengths_S in zip(starts.T, chunks_SL.T, strict=True)
        for start, length in zip(starts_S, lengths_S, strict=True)
    ]
    return torch.cat(pieces)


def _check(rows_TH: torch.Tensor, weights_TE: torch.Tensor, map_TE: torch.Tensor, groups: Groups) -> range:
    if rows_TH.dim() != 2 or weights_TE.dim() != 2 or weights_TE.shape != map_TE.shape:
        raise DispatcherError(
            f"rows {tuple(rows_TH.shape)} must be (T, H), weights {tuple(weights_TE.shape)} and map "
            f"{tuple(map_TE.shape)} (T, E)"
        )
    if rows_TH.shape[0] != map_TE.shape[0]:
        raise DispatcherError(f"{rows_TH.shape[0]} rows, but a map of {map_TE.shape[0]}")
    if map_TE.dtype != torch.bool:
        raise DispatcherError(f"the map must be boolean, not {map_TE.dtype}")
    return groups.experts(map_TE.shape[1])


DISPATCH: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Groups], Dispatched]] = {
    "allgather": allgather,
    "alltoall": alltoall,
}
