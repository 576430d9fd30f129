"""Differentiable collectives over rows, with unequal numbers of rows per rank.

All of them use one all-to-all with splits, whose gradient is the reverse all-to-all. A gather sends a copy of the rows
to every rank. A reduce-scatter sends each piece to its rank, which sums the pieces in rank order, so the result does
not depend on the backend's reduction. This moves more bytes than fused collectives: it is a reference, not a fast path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def size(group: Group) -> int:
    """The number of ranks in `group`; None is a group of one."""
    return 1 if group is None else dist.get_world_size(group)


def rank(group: Group) -> int:
    """This rank's index in `group`."""
    return 0 if group is None else dist.get_rank(group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = list(send), list(receive), group
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), ctx.receive, ctx.send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # `exchange` calls apply, so the gradient is differentiable too.
        return exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> torch.Tensor:
    """All-to-all over the first dimension: `send[r]` rows to rank r, `receive[r]` from it, in rank order.

    Raises ValueError if the splits do not match the group or the rows. The caller ensures that ranks agree on them.
    """
    if not len(send) == len(receive) == size(group) or sum(send) != rows.shape[0]:
        raise ValueError(
            f"rank {rank(group)} of {size(group)}: splits {list(send)} out and {list(receive)} in, {rows.shape[0]} rows"
        )
    if group is None:
        return rows
    out: torch.Tensor = _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return out


def counts(own: torch.Tensor, group: Group) -> torch.Tensor:
    """The counts of every rank, int64 (ranks, *own.shape) on the device of `own`; `own` are this rank's counts."""
    own = own.to(torch.int64).contiguous()
    if group is None:
        return own[None]
    found = [torch.empty_like(own) for _ in range(size(group))]
    dist.all_gather(found, own, group=group)
    return torch.stack(found)


def gather(rows: torch.Tensor, of_rank: Sequence[int], group: Group) -> torch.Tensor:
    """Rows of all ranks in rank order, `of_rank[r]` from rank r. The gradient is summed over ranks."""
    ranks = size(group)
    everyone = rows.repeat(ranks, *[1] * (rows.dim() - 1))
    return exchange(everyone, [rows.shape[0]] * ranks, of_rank, group)


def reduce_scatter(rows: torch.Tensor, of_rank: Sequence[int], group: Group) -> torch.Tensor:
    """The sum over ranks of this rank's part of `rows`; rank r's part has `of_rank[r]` rows."""
    own = of_rank[rank(group)]
    pieces = exchange(rows, of_rank, [own] * size(group), group)
    return pieces.reshape(size(group), own, *rows.shape[1:]).sum(0)
