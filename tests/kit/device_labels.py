"""A GPU that is only a label: tensors say where they would be, and an operator that mixes host and device raises.

A tensor made for a CUDA device is labelled by its storage; what is computed from it inherits the label, and `.to`,
`.cuda` and `.cpu` copy and change it. Everything runs on the CPU. What CUDA takes from the host is taken: scalars of no
dimension, copies between the two, and indices. Collectives take device tensors only, as NCCL does.

Not seen: kernels, streams, and what branches on `torch.cuda.is_available()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from moeref_conformance.contract.api import Cell, Target, World
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class Mixed(RuntimeError):
    """What CUDA or NCCL would have refused."""


class Labels(TorchDispatchMode):
    """Knows which storages are on the device, and judges every operator below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, StorageWeakRef] = {}
        self.made = True  # where a function without tensors makes its result
        self._forced: bool | None = None
        self.judged = 0  # operators that had a device tensor

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on the device."""
        return tensor.untyped_storage()._cdata in self._held

    def put(self, tensor: torch.Tensor, device: bool) -> None:
        """Label the storage of `tensor`. The weak reference keeps its address from being used again."""
        storage = tensor.untyped_storage()
        if not device:
            self._held.pop(storage._cdata, None)
        elif storage._cdata not in self._held:
            self._held[storage._cdata] = StorageWeakRef(storage)
            if len(self._held) % 20_000 == 0:
                self._held = {key: ref for key, ref in self._held.items() if not ref.expired()}

    @contextmanager
    def forced(self, device: bool) -> Iterator[None]:
        """What is made inside is there, whatever it is made of: a transfer."""
        before, self._forced = self._forced, device
        try:
            yield
        finally:
            self._forced = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = any(self.on_device(t) for t in given)
        if self._forced is None:
            self._judge(func, args, given, device)
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in given}
        there = (device or (not given and self.made)) if self._forced is None else self._forced
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in known:
                self.put(made, there)
        return out

    def _judge(self, func: Any, args: Any, given: list[torch.Tensor], device: bool) -> None:
        name = func.overloadpacket.__name__
        self.judged += device
        if func.namespace == "c10d":
            if hosts := [t for t in given if not self.on_device(t)]:
                raise Mixed(f"collective {name} of a host tensor {list(hosts[0].shape)} {hosts[0].dtype}")
            return
        if not device or name in ("copy_", "_copy_from"):
            return
        hosts = [t for t in given if t.dim() and not self.on_device(t)]
        if name in _INDEXED and self.on_device(args[0]):
            indices = {id(t) for t in tree_leaves(args[1])}
            hosts = [t for t in hosts if id(t) not in indices]
        if hosts:
            where = ", ".join(f"{list(t.shape)} {'device' if self.on_device(t) else 'host'}" for t in given)
            raise Mixed(f"{func} mixes host and device: {where}")


class _Move(torch.autograd.Function):
    """A copy to the other side; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: bool, labels: Labels) -> torch.Tensor:
        ctx.back, ctx.labels = labels.on_device(tensor), labels
        with labels.forced(device):
            return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with ctx.labels.forced(ctx.back):
            return grads[0].clone(), None, None


class _Functions(TorchFunctionMode):
    """Devices as arguments and as attributes, which the dispatcher below no longer sees."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        labels, first = self.labels, args[0] if args else None
        if isinstance(first, torch.Tensor) and func in _ATTRIBUTES:
            return _ATTRIBUTES[func](labels.on_device(first))
        func = self._host_only(func, first)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return self._moved(first, func is torch.Tensor.cuda)
        if func is torch.Tensor.to:
            return self._to(args, kwargs)
        asked = _side(kwargs.get("device"))
        if asked is not None:
            kwargs["device"] = HOST
        elif func is torch.Tensor.new_tensor:  # made from Python numbers, below the dispatcher
            asked = labels.on_device(first)
        inherits = any(isinstance(t, torch.Tensor) and labels.on_device(t) for t in tree_leaves(args))
        before, labels.made = labels.made, inherits if asked is None else asked
        try:
            out = func(*args, **kwargs)
        finally:
            labels.made = before
        if asked is None or not isinstance(out, torch.Tensor):
            return out
        if isinstance(first, torch.Tensor) and func is not torch.Tensor.new_tensor:
            return self._moved(out, asked)  # new_*, *_like and as_tensor, elsewhere than what they start from
        labels.put(out, asked)
        return out

    def _host_only(self, func: Any, first: Any) -> Any:
        if func in _OF_THE_HOST and self.labels.on_device(first):
            raise Mixed(f"{func.__name__} of a device tensor")
        return _OF_THE_HOST.get(func, func)

    def _moved(self, tensor: torch.Tensor, device: bool) -> torch.Tensor:
        if self.labels.on_device(tensor) == device:
            return tensor
        return _Move.apply(tensor, device, self.labels)  # type: ignore[no-any-return, no-untyped-call]

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        wanted = kwargs.get("device", args[1] if len(args) > 1 else None)
        if isinstance(wanted, torch.Tensor):
            side: bool | None = self.labels.on_device(wanted)
        elif (side := _side(wanted)) is not None:
            if "device" in kwargs:
                kwargs["device"] = HOST
            else:
                args = (args[0], HOST, *args[2:])
        out: torch.Tensor = torch.Tensor.to(*args, **kwargs)
        return out if side is None else self._moved(out, side)


def _side(device: Any) -> bool | None:
    """Whether an argument names the device; None if it is no argument for one."""
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        return None
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    return {"cuda": True, "cpu": False}.get(kind)


_ATTRIBUTES: Mapping[Any, Callable[[bool], Any]] = {
    torch.Tensor.device.__get__: lambda on: DEVICE if on else HOST,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda on: on,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda on: not on,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda on: 0 if on else -1,
}


#: What only host tensors have, and what is called instead: pinned memory needs a driver.
_OF_THE_HOST: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.numpy: torch.Tensor.numpy,
    torch.Tensor.__array__: torch.Tensor.__array__,
    torch.Tensor.pin_memory: torch.Tensor.clone,
}


@contextmanager
def labelled() -> Iterator[Labels]:
    """Label what is made inside. The CPU substitutions of the kit have to be in place."""
    labels, current, engine = Labels(), torch.cuda.current_device, torch.autograd._engine_run_backward
    of_objects = distributed_c10d._get_object_coll_device

    def backward(*args: Any, **kwargs: Any) -> Any:
        # torch.autograd.backward is a function that modes see, and they are off inside it.
        with _Functions(labels):  # type: ignore[no-untyped-call]
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = backward
    distributed_c10d._get_object_coll_device = lambda group: str(DEVICE)  # as it is for NCCL's groups
    torch.cuda.current_device = lambda: 0 if torch._C._len_torch_function_stack() else HOST  # type: ignore[assignment,return-value]
    try:
        with _Functions(labels), labels:  # type: ignore[no-untyped-call]
            yield labels
    finally:
        torch.cuda.current_device, torch.autograd._engine_run_backward = current, engine
        distributed_c10d._get_object_coll_device = of_objects


def run_rank(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """The probe's steps, as a rank entry, with the model on the labelled device."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from moeref_conformance.steps import run
    from moeref_conformance.worlds import collectives

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):  # the kit's substitution takes them to be on the host
        module.maybe_move_tensor_to_cpu = to_host
    _torch_s_own()
    signatures = collectives._agree
    with labelled() as labels:

        def agree(*args: Any) -> None:
            with labels.forced(False):  # the kit's own exchange of signatures goes over gloo in every world
                signatures(*args)

        collectives._agree = agree
        run.run_rank(target, cell, replace(world, device=str(DEVICE)), inputs, record_dir)
    (record_dir / "judged.txt").write_text(str(labels.judged))


def _torch_s_own() -> None:
    """Take back the kit's substitution for `device="cuda"`: the labels stand in for it, and have to see the device."""
    from moeref_conformance.worlds import cpu

    for owner, names in ((torch, cpu.FACTORIES), (torch.Tensor, (*cpu.METHODS, "cuda"))):
        for name in names:
            setattr(owner, name, getattr(owner, name).__wrapped__)


def mask_on_the_host(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """As `run_rank`, of a model whose attention under context parallelism makes its mask on the host."""
    from moeref.megatron import context

    real = context.causal_mask
    context.causal_mask = lambda ends, cp, cp_rank, device, before=None: real(ends, cp, cp_rank, HOST, before)
    run_rank(target, cell, world, inputs, record_dir)


def norms_on_the_host(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """As `run_rank`, of a model whose norms stay where torch makes them."""
    from moeref.megatron.norms import TorchNorm

    TorchNorm._apply = lambda self, fn, recurse=True: self  # type: ignore[method-assign,assignment]
    run_rank(target, cell, world, inputs, record_dir)
