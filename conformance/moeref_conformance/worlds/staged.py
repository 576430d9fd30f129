"""The backend "staged": collectives on GPU tensors by way of host copies and a real ProcessGroupGloo.

With it several ranks can share one GPU, which NCCL refuses. Every call copies its tensors to host buffers, runs gloo's
own collective on them, and copies what came back to the GPU in `wait()`, so that asynchronous calls stay asynchronous.
Calls with CPU tensors alone go to gloo unchanged, unless `register(force=True)` has these staged too: that tests the
copying without a GPU.

Beyond copying it adds what NCCL has and gloo lacks: an all-gather of pieces with unequal first dimensions (expert
tensor parallelism, all-to-all), ReduceOp.AVG, and moving 8-bit floats. Tensors that are not contiguous are refused, as
NCCL does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from moeref_conformance.worlds.uneven import padded
from torch._C._distributed_c10d import BarrierOptions, Store

NAME = "staged"
#: Every collective writes to its first argument (or, like a broadcast, to the parts of it that are not this rank's).
COLLECTIVES = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather_coalesced",
    "_allgather_base",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "recv",
    "recv_anysource",
)
#: Other names of torch, newer or older, for the same calls.
ALIASES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
#: One byte wide, and unknown to gloo: moved as uint8.
BYTES = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d).startswith("torch.float8"))


class StagedWork(dist.Work):
    """The work of a staged call. The results are on the device after `wait`, or once `is_completed` is true."""

    def __init__(self, works: list[dist.Work], deliver: Callable[[], None]) -> None:
        super().__init__()
        self._works = works
        self._deliver: Callable[[], None] | None = deliver

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for gloo, then copy back. Raises what gloo raises. Waiting again does nothing, as with NCCL."""
        if self._deliver is None:
            return True  # gloo would wait for a second message
        done = [work.wait(timeout) if timeout else work.wait() for work in self._works]
        deliver, self._deliver = self._deliver, None
        deliver()
        return all(done)

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether gloo is done; the results are then on the device."""
        return all(work.is_completed() for work in self._works) and self.wait()

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()


class _Copies:
    """The host copies of the tensors of one call, and the copying back."""

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def host(self, value: Any, back: bool) -> Any:
        """`value` with host copies in the place of its tensors (lists in lists are copied); `back`: these are outputs.

        Outputs are copied to the host as well: what a collective leaves alone must come back as it was.
        """
        if isinstance(value, list | tuple):
            return [self.host(v, back) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_contiguous():
            raise ValueError(f"tensor {list(value.shape)} with strides {list(value.stride())} must be contiguous")
        copy = value.detach().to("cpu", copy=True)
        copy = copy.view(torch.uint8) if copy.dtype in BYTES else copy
        if back:
            self._back.append((value, copy))
        return copy

    def deliver(self) -> None:
        """Copy outputs back through `.data`, so that autograd sees no change, as with a real collective."""
        for tensor, copy in self._back:
            tensor.data.copy_(copy.view(tensor.dtype) if tensor.dtype in BYTES else copy)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


class StagedGroup(dist.ProcessGroup):
    """A process group whose members run gloo's collectives on host copies. One gloo group each, on its own store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, force: bool = False) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for Python's subclasses
        self.store = store
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.force = force
        self._together: list[dist.Work] | None = None
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        for device in ("cpu", "cuda"):  # torch looks up the backend of a device here
            self._register_backend(torch.device(device), kind, self.gloo)

    def getBackendName(self) -> str:
        """`staged`."""
        return NAME

    def get_group_store(self) -> Store:
        """The store that the group was made on."""
        return self.store

    def staged(self, *values: Any) -> bool:
        """Whether a call with these arguments goes over host copies."""
        tensors = [t for value in values for t in _tensors(value)]
        return bool(tensors) and (self.force or any(t.device.type != "cpu" for t in tensors))

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Also of pieces with unequal first dimensions."""
        if not self.staged(outputs, inputs):
            return self.gloo.allgather(outputs, inputs, *options)
        copies, (outs,), (mine,) = _Copies(), outputs, inputs
        pieces, mine = copies.host(outs, back=True), copies.host(mine, back=False)
        outputs, largest, trim = padded(pieces, mine)

        def deliver() -> None:
            trim()
            copies.deliver()

        return self._kept(StagedWork([self.gloo.allgather([outputs], [largest], *options)], deliver))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """One all-gather for each pair of tensors."""
        works = [self._allgather_base(out, x) for out, x in zip(outputs, inputs, strict=True)]
        return StagedWork(works, lambda: None)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """One reduce-scatter for each pair of tensors."""
        works = [self._reduce_scatter_base(out, x, *options) for out, x in zip(outputs, inputs, strict=True)]
        return StagedWork(works, lambda: None)

    def _start_coalescing(self, _: torch.device) -> None:
        """From here on torch waits for the work of `_end_coalescing` instead of that of each call. gloo has neither."""
        self._together = []

    def _end_coalescing(self, _: torch.device) -> StagedWork:
        works, self._together = self._together or [], None
        return StagedWork(works, lambda: None)

    def _kept(self, work: StagedWork) -> StagedWork:
        if self._together is not None:
            self._together.append(work)
        return work

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        """gloo sends a host copy, so the tensor may change at once."""
        if not self.staged(tensors):
            return self.gloo.send(tensors, to, tag)
        return self.gloo.send(_Copies().host(tensors, back=False), to, tag)

    def barrier(self, opts: Any = None) -> Any:
        """gloo's, after the device's work."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return self.gloo.barrier(BarrierOptions() if opts is None else opts)

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refused: torch would make a group of plain gloo. `new_group` makes a staged one."""
        raise NotImplementedError("split_group of a staged group: use torch.distributed.new_group")


def _collective(name: str) -> Callable[..., Any]:
    def collective(group: StagedGroup, *args: Any) -> Any:
        real = getattr(group.gloo, name)
        average = getattr(args[-1], "reduceOp", None) == dist.ReduceOp.AVG
        if not group.staged(*args) and not average:
            return real(*args)
        copies = _Copies()
        host = [copies.host(arg, back=place == 0) for place, arg in enumerate(args)]
        if not average:
            return group._kept(StagedWork([real(*host)], copies.deliver))
        options = host[-1]
        options.reduceOp = dist.ReduceOp.SUM

        def divide() -> None:
            for out in _tensors(host[0]):
                out.div_(group.size())
            copies.deliver()

        return group._kept(StagedWork([real(*host)], divide))

    collective.__name__ = name
    collective.__doc__ = f"ProcessGroupGloo.{name} on host copies."
    return collective


for _name in COLLECTIVES:
    setattr(StagedGroup, _name, _collective(_name))
for _alias, _name in ALIASES.items():
    setattr(StagedGroup, _alias, getattr(StagedGroup, _name))


def register(force: bool = False) -> None:
    """Make `staged` known to torch.distributed in this process; with `force` CPU tensors are staged too. Once."""

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
        return StagedGroup(store, rank, size, timeout, force)

    dist.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])
