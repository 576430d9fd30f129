"""Checked collectives: before the data moves, the members of a group agree on what is about to move.

gloo under-fills an all-to-all whose splits disagree, or aborts the process, and scatters wrong bytes from tensors that
are not contiguous; NCCL hangs. So `install()` wraps torch.distributed's collectives: every member first sends
a fixed-size int64 signature of its call (one small all-gather), all members check the same table, and on disagreement
all of them raise CollectiveMismatch. Then the output buffers are poisoned (NaN, or the largest integer), so that what a
collective does not fill shows. Install before megatron-core is imported: it captures collectives by name at import.

Point-to-point calls are left alone but for poisoned receive buffers. With `async_op=True` the check still completes
first; then the real Work is returned. What a call declares is described in `collective_specs.py`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from moeref_conformance.worlds.collective_specs import ALIASES, SPECS, Describe, Spec
from torch.distributed import distributed_c10d as c10d

DTYPE_NAMES = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})


class CollectiveMismatch(RuntimeError):
    """The members of a group disagree on a collective, or one of them passes a tensor that is not contiguous."""


OPS = [name for name in SPECS if name not in ALIASES]

REDUCTIONS = ["", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

HEADER = ("op", "dtype", "shape", "root", "reduction", "contiguous")
SHOWN = 4  # dimensions of the shape that follow the header, so that a message can show them
_guard = threading.local()  # `busy` inside a wrapped collective: all_gather_into_tensor calls all_gather_single


def install() -> None:
    """Wrap every collective of SPECS and the receives, in torch.distributed and in distributed_c10d. Once a process."""
    if getattr(c10d.all_reduce, "_checked", False):
        return
    for name, describe in SPECS.items():
        if hasattr(c10d, name):
            _replace(name, _checked(ALIASES.get(name, name), getattr(c10d, name), describe))
    for name in ("recv", "irecv"):
        _replace(name, _poisoned_receive(getattr(c10d, name)))


def _replace(name: str, function: Callable[..., Any]) -> None:
    function._checked = True  # type: ignore[attr-defined]
    for module in (c10d, dist):
        if hasattr(module, name):
            setattr(module, name, function)


def _checked(op: str, real: Callable[..., Any], describe: Describe) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        group = bound.arguments["group"]
        group = c10d._get_default_group() if group is None else group
        if getattr(_guard, "busy", False) or group == dist.GroupMember.NON_GROUP_MEMBER:
            return real(*args, **kwargs)
        _guard.busy = True
        try:
            n, me = group.size(), group.rank()
            call = describe(bound.arguments, group, n, me)
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


def _hash(shape: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(str(shape).encode(), digest_size=7).digest(), "big")


def _agree(op: str, call: Spec, group: Any, n: int, me: int) -> None:
    """Exchange signatures, int64 of len(HEADER) + SHOWN + 2·n a member; raise on all members if they do not fit."""
    shape = [int(d) for d in call.shape]
    header = [
        OPS.index(op),
        -1 if call.dtype is None else DTYPE_NAMES.index(str(call.dtype).removeprefix("torch.")),
        _hash(shape),
        call.root,
        REDUCTIONS.index(call.reduce),
        int(all(x.is_contiguous() for x in (*call.inputs, *call.outputs))),
        *[*shape, *[-1] * SHOWN][:SHOWN],
    ]
    zero = [0] * n
    where = _device(group)
    mine = torch.tensor([*header, *(call.send or zero), *(call.expect or zero)], dtype=torch.int64, device=where)
    everyone = torch.empty(n * mine.numel(), dtype=torch.int64, device=where)
    group._allgather_base(everyone, mine).wait()
    table = everyone.view(n, -1).tolist()
    trouble = _trouble(table, n, call, me)
    if trouble:
        ranks = dist.get_process_group_ranks(group)
        raise CollectiveMismatch(
            f"{op} in group {ranks}, rank {ranks[me]}: {trouble(ranks)}; this rank passes {_text(call)}"
        )


def _device(group: Any) -> torch.device:
    """Where a tensor must be for this group to move it: on the CPU if it can, else (NCCL) on the rank's GPU."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if not types or "cpu" in types else "cuda")


def _trouble(table: list[list[int]], n: int, call: Spec, me: int) -> Callable[[list[int]], str] | None:
    """What is wrong, as a function of the group's global ranks, or None. All members get the same result."""
    h = len(HEADER)
    send = [row[h + SHOWN : h + SHOWN + n] for row in table]
    expect = [row[h + SHOWN + n :] for row in table]
    names: dict[str, Callable[[int], str]] = {
        "op": lambda i: OPS[table[i][0]],
        "dtype": lambda i: "none" if table[i][1] < 0 else DTYPE_NAMES[table[i][1]],
        "shape": lambda i: str([d for d in table[i][h : h + SHOWN] if d >= 0]),
        "root": lambda i: str(table[i][3]),
        "reduction": lambda i: REDUCTIONS[table[i][4]] or "none",
    }
    for column, what in enumerate(HEADER[:-1]):
        if len({row[column] for row in table}) > 1:
            said = [names[what](i) for i in range(n)]
            return lambda ranks: (
                f"{what} differs: " + ", ".join(f"rank {r} has {s}" for r, s in zip(ranks, said, strict=True))
            )
    if not all(row[h - 1] for row in table):
        return lambda ranks: (
            "tensor is not contiguous on rank "
            + ", ".join(str(ranks[i]) for i in range(n) if not table[i][h - 1])
            + " (NCCL refuses it, gloo may move wrong bytes)"
        )
    wrong = [j for j in range(n) if [send[i][j] for i in range(n)] != expect[j] or -1 in send[j] or -1 in expect[j]]
    if not wrong:
        return None

    def tell(ranks: list[int]) -> str:
        told = []
        for j in [me] * (me in wrong) + [j for j in wrong if j != me]:
            peers, who = [send[i][j] for i in range(n)], "I expect" if j == me else f"rank {ranks[j]} expects"
            told.append(f"peers send {peers} {call.unit}, {who} {expect[j]}")
        bad = sorted({j for j in range(n) if -1 in send[j] or -1 in expect[j]})
        told += [f"rank {ranks[j]} passes splits or pieces that do not add up to its tensor (-1)" for j in bad]
        return "; ".join(told)

    return tell


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
