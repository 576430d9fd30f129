"""Rank entry that makes right and wrong collective calls on two ranks and writes down what came of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.worlds.collectives import CollectiveMismatch


def all_reduce(me: int) -> Any:
    x = torch.full((2, 3), float(me + 1))
    dist.all_reduce(x)
    return x.flatten().tolist()


def all_reduce_async(me: int) -> Any:
    x = torch.full((4,), me + 1)
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    return [type(work).__name__, x.tolist()]


def reduce(me: int) -> Any:
    x = torch.tensor([float(me + 1)])
    dist.reduce(x, dst=1)
    return x.item() if me == 1 else None


def broadcast(me: int) -> Any:
    x = torch.tensor([me + 1, me])
    dist.broadcast(x, src=1)
    return x.tolist()


def all_gather(me: int) -> Any:
    out = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(out, torch.full((2,), float(me)))
    return [piece.tolist() for piece in out]


def all_gather_uneven(me: int) -> Any:
    whole = torch.zeros(4, 2)
    dist.all_gather(list(whole.split([3, 1])), torch.full((3 - 2 * me, 2), float(me + 1)))
    return whole[:, 0].tolist()


def all_gather_in_place(me: int) -> Any:
    whole = torch.zeros(4)
    mine = whole[2 * me : 2 * me + 2]
    mine.fill_(me + 1.0)
    dist.all_gather_into_tensor(whole, mine)
    return whole.tolist()


def all_gather_base(me: int) -> Any:
    whole = torch.zeros(2, 2)
    dist._all_gather_base(whole, torch.full((1, 2), float(me)))
    return whole.tolist()


def reduce_scatter(me: int) -> Any:
    out = torch.zeros(2)
    dist.reduce_scatter(out, [torch.ones(2), torch.full((2,), 5.0)])
    return out.tolist()


def reduce_scatter_uneven(me: int) -> Any:
    out = torch.zeros(3 - 2 * me)
    dist.reduce_scatter(out, [torch.ones(3), torch.full((1,), 5.0)])
    return out.tolist()


def reduce_scatter_in_place(me: int) -> Any:
    whole = torch.arange(4.0)
    out = whole[2 * me : 2 * me + 2]
    dist.reduce_scatter_tensor(out, whole)
    return out.tolist()


def all_to_all_even(me: int) -> Any:
    out = torch.zeros(4)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * me)
    return out.tolist()


def all_to_all_uneven(me: int) -> Any:
    send, expect = ([1, 3], [1, 0]) if me == 0 else ([0, 2], [3, 2])
    out = torch.zeros(sum(expect), 2, dtype=torch.bfloat16)
    dist.all_to_all_single(out, torch.full((sum(send), 2), me + 1, dtype=torch.bfloat16), expect, send)
    return out[:, 0].tolist()


def scatter(me: int) -> Any:
    out = torch.zeros(2)
    dist.scatter(out, [torch.ones(2), torch.full((2,), 2.0)] if me == 1 else None, src=1)
    return out.tolist()


def gather(me: int) -> Any:
    out = [torch.zeros(2), torch.zeros(2)] if me == 0 else None
    dist.gather(torch.full((2,), float(me)), out, dst=0)
    return [piece.tolist() for piece in out] if out else None


def objects(me: int) -> Any:
    out: list[Any] = [None, None]
    dist.all_gather_object(out, {"rank": me, "pad": "x" * (1 + 100 * me)})
    told = [["root", 1]] if me == 1 else [None]
    dist.broadcast_object_list(told, src=1)
    return [[o["rank"] for o in out], told]


def subgroup(me: int) -> Any:
    alone = [dist.new_group([r]) for r in range(2)][me]
    x = torch.ones(1)
    dist.all_reduce(x, group=alone)
    pair = dist.new_group([0, 1])
    dist.all_reduce(x, group=pair)
    dist.barrier(pair)
    return x.item()


def batched_p2p(me: int) -> Any:
    buffer = torch.zeros(2, requires_grad=True)
    ops = [dist.P2POp(dist.isend, torch.full((2,), me + 1.0), 1 - me), dist.P2POp(dist.irecv, buffer, 1 - me)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return buffer.tolist()


def receive_buffer_is_poisoned(me: int) -> Any:
    buffer = torch.zeros(2)
    seen = None
    if me == 1:
        work = dist.irecv(buffer, src=0)
        seen = bool(buffer.isnan().all())
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.send(torch.ones(2), dst=1)
    return [seen, buffer.tolist()]


def wrong_op(me: int) -> Any:
    if me:
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_gather_into_tensor(torch.zeros(4), torch.ones(2))


def wrong_barrier(me: int) -> Any:
    if me:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(2))


def wrong_dtype(me: int) -> Any:
    dist.all_reduce(torch.ones(2, dtype=torch.bfloat16 if me else torch.float32))


def broadcast_flat(me: int) -> Any:
    """A receiver may have a flat buffer for a matrix."""
    given = torch.empty(6) if me else torch.arange(6.0).view(2, 3)
    dist.broadcast(given, src=0)
    return given.flatten().tolist()


def wrong_flat(me: int) -> Any:
    dist.broadcast(torch.ones(5) if me else torch.ones(2, 3), src=0)


def wrong_shape(me: int) -> Any:
    dist.all_reduce(torch.ones(2 + me, 3))


def wrong_reduction(me: int) -> Any:
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if me else dist.ReduceOp.SUM)


def wrong_root(me: int) -> Any:
    dist.broadcast(torch.ones(2), src=me)


def wrong_splits(me: int) -> Any:
    send, expect = ([1, 3], [1, 0]) if me == 0 else ([0, 0], [1, 0])
    dist.all_to_all_single(torch.zeros(sum(expect)), torch.ones(sum(send)), expect, send)


def wrong_sum(me: int) -> Any:
    dist.all_to_all_single(torch.zeros(2), torch.ones(2), [1, 1], [1, 1] if me else [1, 2])


def wrong_row(me: int) -> Any:
    dist.all_to_all_single(torch.zeros(2, 3), torch.ones(2, 4 if me else 3), [1, 1], [1, 1])


def wrong_piece(me: int) -> Any:
    dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(3 if me else 2))


def wrong_scatter(me: int) -> Any:
    dist.scatter(torch.zeros(2), [torch.ones(2), torch.ones(3)] if me == 0 else None, src=0)


def not_contiguous(me: int) -> Any:
    x = torch.arange(4.0).reshape(2, 2)
    pieces = [x.t(), x] if me == 0 else None
    dist.scatter(torch.zeros(2, 2), pieces, src=0)


CASES: dict[str, Callable[[int], Any]] = {
    f.__name__: f
    for f in (
        all_reduce, all_reduce_async, reduce, broadcast, broadcast_flat, all_gather, all_gather_uneven,
        all_gather_in_place, all_gather_base, reduce_scatter, reduce_scatter_uneven, reduce_scatter_in_place,
        all_to_all_even, all_to_all_uneven, scatter, gather, objects, subgroup, batched_p2p, receive_buffer_is_poisoned,
        wrong_op, wrong_barrier, wrong_dtype, wrong_shape, wrong_flat, wrong_reduction, wrong_root, wrong_splits,
        wrong_sum, wrong_row, wrong_piece, wrong_scatter, not_contiguous,
    )
}  # fmt: skip


def run(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Every case in turn: a refused call moves no data, so the ranks stay in step."""
    told: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            told[name] = case(world.rank)
        except CollectiveMismatch as error:
            told[name] = str(error)
    (folder / "told.json").write_text(json.dumps(told))
