"""Rank entry that makes every kind of collective call, in several dtypes, and keeps what each gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.worlds import collectives as checked
from moeref_conformance.worlds import staged
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import _coalescing_manager

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool
)  # fmt: skip
LATE = 0.02  # seconds that one rank comes late to each call: what is copied back too early is stale


def values(rank: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Other values on every rank, exact in every dtype."""
    count = torch.Size(shape).numel()
    flat = (torch.arange(count) * 7 + rank * 5) % (2 if dtype == torch.bool else 11)
    return flat.to(dtype).reshape(shape)


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


@dataclass(frozen=True)
class Calls:
    """One collective a method, on rank `me` of `n`. `later` is `async_op` of those that take it."""

    me: int
    n: int
    pair: Any
    dtype: torch.dtype
    later: bool

    def x(self, *shape: int) -> torch.Tensor:
        return values(self.me, *shape, dtype=self.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def all_reduce(self, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        t = self.x(3, 2)
        finish(dist.all_reduce(t, op=op, group=group, async_op=self.later))
        return t

    def reduce(self) -> Any:
        t = self.x(5)
        finish(dist.reduce(t, dst=1, async_op=self.later))
        return t if self.me == 1 else None

    def broadcast(self) -> Any:
        t = self.x(2, 3)
        finish(dist.broadcast(t, src=1, async_op=self.later))
        return t

    def all_gather(self) -> Any:
        out = [self.empty(2, 2) for _ in range(self.n)]
        finish(dist.all_gather(out, self.x(2, 2), async_op=self.later))
        return out

    def all_gather_single(self) -> Any:
        out = self.empty(2 * self.n, 3)
        finish(dist.all_gather_into_tensor(out, self.x(2, 3), async_op=self.later))
        return out

    def all_gather_in_place(self) -> Any:
        out = self.empty(2 * self.n)
        mine = out[2 * self.me : 2 * self.me + 2]
        mine.copy_(self.x(2))
        finish(dist.all_gather_into_tensor(out, mine, async_op=self.later))
        return out

    def reduce_scatter(self) -> Any:
        out = self.empty(2)
        finish(dist.reduce_scatter(out, [self.x(2) for _ in range(self.n)], async_op=self.later))
        return out

    def reduce_scatter_single(self) -> Any:
        out = self.empty(2, 2)
        finish(dist.reduce_scatter_tensor(out, self.x(2 * self.n, 2), async_op=self.later))
        return out

    def all_to_all_even(self) -> Any:
        out = self.empty(2 * self.n, 2)
        finish(dist.all_to_all_single(out, self.x(2 * self.n, 2), async_op=self.later))
        return out

    def all_to_all_uneven(self) -> Any:
        send, expect = [(self.me + j) % 3 for j in range(self.n)], [(self.me + j) % 3 for j in range(self.n)]
        out = self.empty(sum(expect), 2)
        finish(dist.all_to_all_single(out, self.x(sum(send), 2), expect, send, async_op=self.later))
        return out

    def all_to_all(self) -> Any:
        out = [self.empty(1 + (self.me + j) % 2) for j in range(self.n)]
        finish(dist.all_to_all(out, [self.x(1 + (self.me + j) % 2) for j in range(self.n)], async_op=self.later))
        return out

    def scatter(self) -> Any:
        out = self.empty(2)
        given = [(self.x(2) + j).to(self.dtype) for j in range(self.n)] if self.me == 1 else None
        finish(dist.scatter(out, given, src=1, async_op=self.later))
        return out

    def gather(self) -> Any:
        out = [self.empty(2) for _ in range(self.n)] if self.me == 0 else None
        finish(dist.gather(self.x(2), out, dst=0, async_op=self.later))
        return out

    def ring(self) -> Any:
        out = self.empty(4)
        works = [dist.isend(self.x(4), (self.me + 1) % self.n), dist.irecv(out, (self.me - 1) % self.n)]
        for work in works:
            finish(work)
        return out

    def batched(self) -> Any:
        out, t = [self.empty(3), self.empty(3)], self.x(3)
        left, right = (self.me - 1) % self.n, (self.me + 1) % self.n
        ops = [dist.P2POp(dist.isend, t, right), dist.P2POp(dist.irecv, out[0], left)]
        ops += [dist.P2POp(dist.isend, t, left), dist.P2POp(dist.irecv, out[1], right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    def blocking(self) -> Any:
        out = self.empty(2)
        if self.me == 0:
            dist.send(self.x(2), 1, tag=3)
        elif self.me == 1:
            return [dist.recv(out, tag=3), out]  # from any source
        return out

    def coalesced(self) -> Any:
        ts = [self.x(2), self.x(3)]
        with _coalescing_manager(async_ops=self.later) as manager:
            for t in ts:
                dist.all_reduce(t, async_op=self.later)
        manager.wait()
        return ts


def collectives(me: int, n: int, pair: Any, dtype: torch.dtype, later: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every call that takes `async_op`, which is `later`."""
    calls = Calls(me, n, pair, dtype, later)
    yield "all_reduce", calls.all_reduce
    yield "all_reduce_max", lambda: calls.all_reduce(dist.ReduceOp.MAX)
    in_pair = pair is not dist.GroupMember.NON_GROUP_MEMBER
    yield "all_reduce_pair", lambda: calls.all_reduce(group=pair) if in_pair else None
    for call in (
        calls.reduce,
        calls.broadcast,
        calls.all_gather,
        calls.all_gather_single,
        calls.all_gather_in_place,
        calls.reduce_scatter,
        calls.reduce_scatter_single,
        calls.all_to_all_even,
        calls.all_to_all_uneven,
        calls.all_to_all,
        calls.scatter,
        calls.gather,
        calls.ring,
        calls.batched,
        calls.blocking,
        calls.coalesced,
    ):
        yield call.__name__, call


def objects(me: int, n: int) -> list[Any]:
    """Collectives of Python objects; sizes differ."""
    mine = {"rank": me, "pad": "x" * (1 + 50 * me)}
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, mine)
    told = [mine if me == 1 else None]
    dist.broadcast_object_list(told, src=1)
    gathered: list[Any] | None = [None] * n if me == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    given: list[Any] = [None]
    dist.scatter_object_list(given, [f"to {j}" for j in range(n)] if me == 0 else None, src=0)
    dist.barrier()
    return [everyone, told, gathered, given]


def run(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path, faulty: bool = False) -> None:
    """Every call, sync and async, in every dtype. A refusal is kept by the type of its exception."""
    me, n = world.rank, world.size
    pair = dist.new_group([0, 1])
    kept: dict[str, Any] = {} if faulty else {"objects": objects(me, n)}
    for dtype in DTYPES:
        for later in (False, True):
            for name, call in collectives(me, n, pair, dtype, later):
                if me == (0 if name == "blocking" else n - 1):
                    time.sleep(LATE)
                try:
                    found = call()
                except (RuntimeError, ValueError) as error:
                    found = type(error).__name__
                kept[f"{name} {str(dtype).removeprefix('torch.')} {'async' if later else 'sync'}"] = found
    torch.save(kept, folder / "kept.pt")


def run_forgetful(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """The same, with staging that never copies back."""
    staged._Copies.deliver = lambda self: None
    checked._agree = lambda *_: None  # it goes over the same copies, and would end the run at the first call
    run(target, cell, world, inputs, folder, faulty=True)


def run_hasty(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """The same, with staging that copies back before the work is done."""
    real = staged.StagedWork.__init__

    def hasty(self: Any, work: Any, deliver: Callable[[], None]) -> None:
        deliver()
        real(self, work, lambda: None)

    staged.StagedWork.__init__ = hasty
    checked._agree = lambda *_: None
    run(target, cell, world, inputs, folder, faulty=True)


def gathers_coalesced(me: int, device: torch.device | None = None) -> list[list[list[float]]]:
    """What two of them give, before the wait and after it."""
    outs = [torch.zeros(2), torch.zeros(4)]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for out in outs:
            dist.all_gather_into_tensor(out, torch.full((out.numel() // 2,), me + 1.0), async_op=True)
    before = [out.tolist() for out in outs]
    manager.wait()
    return [before, [out.tolist() for out in outs]]


def beyond(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """What gloo alone has not, and what staging must not do."""
    me, group = world.rank, dist.group.WORLD
    told: dict[str, Any] = {}

    pieces = [torch.zeros(3, 2), torch.zeros(1, 2)]
    work = group.allgather([pieces], [torch.full((3 - 2 * me, 2), me + 1.0)], AllgatherOptions())
    told["uneven before"] = [float(piece.sum()) for piece in pieces]
    work.wait()
    told["uneven"] = [piece.tolist() for piece in pieces]

    averages = torch.tensor([me + 1.0, 4.0])
    dist.all_reduce(averages, op=dist.ReduceOp.AVG)
    told["average"] = averages.tolist()
    share = torch.zeros(1)
    dist.reduce_scatter_tensor(share, torch.tensor([me + 1.0, me + 3.0]), op=dist.ReduceOp.AVG)
    told["average scattered"] = share.tolist()

    small = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    dist.all_gather_into_tensor(small, torch.full((1, 2), me + 1.5).to(torch.float8_e4m3fn))
    told["float8"] = small.float().tolist()

    told["gathers coalesced"] = gathers_coalesced(me)[1]
    told["gathers coalesced on a device"] = gathers_coalesced(me, torch.device("cpu"))  # as Transformer Engine's
    outs = [torch.zeros(1), torch.zeros(2)]
    with _coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.reduce_scatter_tensor(out, torch.arange(2.0 * out.numel()), async_op=True)
    manager.wait()
    told["scatters coalesced"] = [out.tolist() for out in outs]

    # A receive returns at once, shows nothing before the wait, and hides nothing from autograd.
    buffer = torch.full((2,), 7.0, requires_grad=True)
    version = buffer._version
    if me == 0:
        work = group.recv([buffer], 1, 0)
        told["receive before"] = buffer.tolist()
        dist.barrier()
        told["receive"] = [work.wait(), buffer.tolist(), buffer._version - version]
        buffer.data.zero_()
        work.wait()
        told["receive again"] = buffer.tolist()
    else:
        dist.barrier()
        payload = torch.tensor([1.0, 2.0])
        work = dist.isend(payload, 0)
        payload.zero_()  # the copy is gloo's
        work.wait()

    for name, call in {
        "strided": lambda: group.send([torch.zeros(4, 4).t()], 1 - me, 0),
        "split": lambda: group.split_group([0]),
    }.items():
        try:
            told[name] = str(call())
        except (ValueError, NotImplementedError) as error:
            told[name] = str(error)
    told["backend"] = [dist.get_backend(), type(group).__name__, dist.get_backend(dist.new_group([0, 1]))]
    torch.save(told, folder / "kept.pt")


def dispatch(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """The entry that the cell's tag names."""
    globals()[cell.tags[0]](target, cell, world, inputs, folder)
