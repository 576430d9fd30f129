"""Checked collectives: before the data moves, the members of a group agree on what is about to move.

gloo under-fills an all-to-all whose splits disagree, or aborts the process, and scatters wrong bytes from tensors that
are not contiguous; NCCL hangs. So `install()` wraps torch.distributed's collectives: every member first sends
a fixed-size int64 signature of its call to all others, all members check the same table, and on disagreement
all of them raise CollectiveMismatch. Then the output buffers are poisoned (NaN, or the largest integer), so that what a
collective does not fill shows. Install before megatron-core is imported: it captures collectives by name at import.

Point-to-point calls are left alone but for poisoned receive buffers. With `async_op=True` the check still completes
first; then the real Work is returned. What a call declares is described in `collective_specs.py`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from moeref_conformance.worlds.collective_specs import ALIASES, FORMS, Spec, describe
from torch.distributed import distributed_c10d as c10d

DTYPE_NAMES = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})


class CollectiveMismatch(RuntimeError):
    """The members of a group disagree on a collective, or one of them passes a tensor that is not contiguous."""


OPS = list(FORMS)
REDUCTIONS = ["", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
#: The first columns of a signature, and what to tell of them. Then come whether all tensors are contiguous, the first
#: SHOWN dimensions of the shape, and for each member the units sent to it and expected from it.
HEADER: dict[str, Callable[[list[int]], str]] = {
    "op": lambda row: OPS[row[0]],
    "dtype": lambda row: "none" if row[1] < 0 else DTYPE_NAMES[row[1]],
    "shape": lambda row: str([d for d in row[6 : 6 + SHOWN] if d >= 0]),  # the column has its hash
    "root": lambda row: str(row[3]),
    "reduction": lambda row: REDUCTIONS[row[4]] or "none",
}
SHOWN = 4
#: In the place of a shape's hash, and in no other column: a buffer that is flat takes a tensor of as many elements.
FLAT = torch.iinfo(torch.int64).min
_guard = threading.local()  # `busy` inside a wrapped collective: all_gather_into_tensor calls all_gather_single


def install() -> None:
    """Wrap every collective of FORMS and the receives, in torch.distributed and in distributed_c10d. Once a process."""
    if getattr(c10d.all_reduce, "_checked", False):
        return
    for name in (*FORMS, *ALIASES):
        if hasattr(c10d, name):
            _replace(name, _checked(ALIASES.get(name, name), getattr(c10d, name)))
    for name in ("recv", "irecv"):
        _replace(name, _poisoned_receive(getattr(c10d, name)))


def _replace(name: str, function: Callable[..., Any]) -> None:
    function._checked = True  # type: ignore[attr-defined]
    for module in (c10d, dist):
        if hasattr(module, name):
            setattr(module, name, function)


def _checked(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    form, parameters = FORMS[op], inspect.signature(real).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

    @functools.wraps(real)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # As Signature.bind and apply_defaults, which take a tenth of a rank's time.
        arguments = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        wrong_call = len(args) > len(parameters) or arguments.keys() != parameters.keys()
        if wrong_call or getattr(_guard, "busy", False):
            return real(*args, **kwargs)
        group = arguments["group"] if arguments["group"] is not None else c10d._get_default_group()
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return real(*args, **kwargs)
        _guard.busy = True
        try:
            n, me = group.size(), group.rank()
            call = describe(form, arguments, group, n, me)
            if n > 1:
                _agree(op, call, group, n, me)
            _poison(call)
            return real(*args, **kwargs)
        finally:
            _guard.busy = False

    # Stacks of hung ranks show the names of code objects: make that the operation.
    named: Any = collective
    named.__code__ = named.__code__.replace(co_name=op)
    return collective


def _poisoned_receive(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_guard, "busy", False):
            _fill(tensor)
        return real(tensor, *args, **kwargs)

    return receive


def _agree(op: str, call: Spec, group: Any, n: int, me: int) -> None:
    """Exchange signatures, a row of int64 a member; raise on all members if they do not fit."""
    row = [
        OPS.index(op),
        -1 if call.dtype is None else DTYPE_NAMES.index(str(call.dtype).removeprefix("torch.")),
        FLAT if call.flat else hash(tuple(call.shape)),  # the same in every process, as for all tuples of integers
        call.root,
        REDUCTIONS.index(call.reduce),
        int(all(x.is_contiguous() for x in (*call.inputs, *call.outputs))),
        *[*call.shape, *[-1] * SHOWN][:SHOWN],
        *call.send,
        *call.expect,
    ]
    mine = torch.tensor(row, dtype=torch.int64, device=_device(group))
    everyone = mine.new_empty(n * mine.numel())
    # Each member sends its row to all. gloo's all-gather passes rows round a ring, at five times the CPU time.
    group.alltoall_base(everyone, mine.repeat(n), [], []).wait()
    table = everyone.view(n, -1).tolist()
    ranks = dist.get_process_group_ranks(group)
    if trouble := _trouble(table, ranks, me, call.unit):
        raise CollectiveMismatch(f"{op} in group {ranks}, rank {ranks[me]}: {trouble}; this rank passes {_text(call)}")


def _device(group: Any) -> torch.device:
    """Where a tensor must be for this group to move it: on the CPU if it can, else (NCCL) on the rank's GPU."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if not types or "cpu" in types else "cuda")


def _trouble(table: list[list[int]], ranks: list[int], me: int, unit: str) -> str:
    """What is wrong, for member `me`, or an empty text. All members find the same."""
    for column, (what, shown) in enumerate(HEADER.items()):
        if len({row[column] for row in table} - {FLAT}) > 1:
            said = [f"rank {rank} has {shown(row)}" for rank, row in zip(ranks, table, strict=True)]
            return f"{what} differs: {', '.join(said)}"
    strided = [str(rank) for rank, row in zip(ranks, table, strict=True) if not row[len(HEADER)]]
    if strided:
        where = ", ".join(strided)
        return f"tensor is not contiguous on rank {where} (NCCL refuses it, gloo may move wrong bytes)"
    n, first = len(ranks), len(HEADER) + 1 + SHOWN
    send, expect = [row[first : first + n] for row in table], [row[first + n :] for row in table]
    bad = [j for j in range(n) if -1 in send[j] or -1 in expect[j]]
    told = []
    for j in sorted(range(n), key=lambda j: j != me):
        peers = [row[j] for row in send]
        if peers != expect[j] or j in bad:
            who = "I expect" if j == me else f"rank {ranks[j]} expects"
            told.append(f"peers send {peers} {unit}, {who} {expect[j]}")
    told += [f"rank {ranks[j]} passes splits or pieces that do not add up to its tensor (-1)" for j in bad]
    return "; ".join(told)


def _text(call: Spec) -> str:
    """This rank's own tensors: shapes, dtypes, strides where they matter."""

    def one(x: torch.Tensor) -> str:
        strides = "" if x.is_contiguous() else f" strides {list(x.stride())}"
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{strides}"

    parts = [
        f"{label} {', '.join(one(x) for x in xs)}" for label, xs in (("in", call.inputs), ("out", call.outputs)) if xs
    ]
    parts += [f"op {call.reduce}"] if call.reduce else []
    parts += [f"root {call.root}"] if call.root >= 0 else []
    return ", ".join(parts) or "no tensor"


def _poison(call: Spec) -> None:
    """Fill the outputs; inputs that share memory with an output (in-place gathers) keep their values."""
    if not call.outputs:
        return
    homes = {out.untyped_storage().data_ptr() for out in call.outputs if out.numel()}
    shared = [x for x in call.inputs if x.numel() and x.untyped_storage().data_ptr() in homes]
    saved = [x.detach().clone() for x in shared]
    for out in call.outputs:
        _fill(out)
    with torch.no_grad():
        for x, value in zip(shared, saved, strict=True):
            x.copy_(value)


def _fill(tensor: torch.Tensor) -> None:
    """NaN for floating point and complex, the largest value for integers, True for bool."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
