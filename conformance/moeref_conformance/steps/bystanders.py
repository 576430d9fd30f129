"""What exports, loads and forwards leave as it was: generators, settings, modules, their hooks and tensors."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from numpy import random as numpy_random  # here, and so once for all ranks: numpy imports it late

from moeref_conformance.steps.config import configs
from moeref_conformance.steps.settings import of_torch
from moeref_conformance.steps.tensors import copied

T = TypeVar("T")
#: Attributes of a parameter that hold its gradient: autograd's, and that of Megatron's DistributedDataParallel.
_GRADIENTS = ("grad", "main_grad")
#: What runs around a module's forward and backward.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Values of settings that can be compared by their text.
_PLAIN = (type(None), bool, int, float, str, list, tuple)
#: Groups of Megatron whose ranks and sizes a caller can set.
_GROUPS = ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel", "expert_tensor_parallel")


@contextmanager
def in_training(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """All modules in training mode, and a gradient in every parameter that has none, as between two steps."""
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    held = [parameter for chunk in chunks for parameter in chunk.parameters()]
    planted = [
        (parameter, kind)
        for parameter in held
        for kind in _GRADIENTS
        if type(parameter.data) is torch.Tensor and parameter.requires_grad and getattr(parameter, kind, None) is None
    ]
    for module, _ in modes:
        module.training = True
    for parameter, kind in planted:
        setattr(parameter, kind, torch.full_like(parameter.data, 0.5))
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, kind in planted:
            if kind == "grad":
                parameter.grad = None
            else:
                vars(parameter).pop(kind, None)


@contextmanager
def partly_frozen(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Every second parameter without `requires_grad`, as where routers or embeddings are not trained.

    In the end those of their names are trained: a load may have replaced them.
    """
    some = [(chunk, name, of) for chunk in chunks for name, of in [*chunk.named_parameters()][::2]]
    frozen = [(chunk, name) for chunk, name, of in some if of.requires_grad and of.is_leaf]
    for chunk, name in frozen:
        chunk.get_parameter(name).requires_grad_(False)
    try:
        yield
    finally:
        for chunk, name in frozen:
            chunk.get_parameter(name).requires_grad_(True)


def state(chunks: Sequence[torch.nn.Module]) -> dict[tuple[str, str], Any]:
    """By kind and name what training needs; tensors as digests of their bytes, and tensors that are none as None."""
    found = modes(chunks) | dict(_generators())
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            found["hooks", f"{number}:{name}"] = [len(vars(module)[kind]) for kind in _HOOKS]
        for name, parameter in chunk.named_parameters():
            key = f"{number}:{name}"
            found["parameter", key] = _digest(parameter)
            found["identity", key] = id(parameter)  # optimizers hold it; `in_training` keeps those of before alive
            for kind in _GRADIENTS:
                found[kind, key] = _digest(getattr(parameter, kind, None))
        for key, held in _buffers(chunk):
            found["buffer", f"{number}:{key}"] = held
    return found


class _Table(NamedTuple):
    """What is kept of a buffer that no state dict has: it may be a cache, which is made or grows where it is asked."""

    elements: int
    digest: str

    def is_longer(self, before: Any) -> bool:
        """Whether it is new, or has more elements than before."""
        return before is None or (isinstance(before, _Table) and self.elements > before.elements)


def _buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Every buffer by name: a digest, or a `_Table`."""
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            held, key = _digest(buffer), f"{prefix}.{name}" if prefix else name
            yield key, _Table(buffer.numel(), held) if name in module._non_persistent_buffers_set else held


def modes(chunks: Sequence[torch.nn.Module]) -> dict[tuple[str, str], Any]:
    """Of `state` what a load has to leave too: settings, configs, training modes, and what is trained."""
    found = dict[tuple[str, str], Any](_settings())
    for module, config in configs(chunks):
        plain = {name: value for name, value in vars(config).items() if isinstance(value, _PLAIN)}
        found |= {("config", f"{module}.{name}"): repr(value) for name, value in plain.items()}
    for number, chunk in enumerate(chunks):
        found |= {("training mode", f"{number}:{name}"): of.training for name, of in chunk.named_modules()}
        found |= {("requires_grad", f"{number}:{name}"): of.requires_grad for name, of in chunk.named_parameters()}
    return found


def amid_training(chunks: Sequence[torch.nn.Module], call: Callable[[], T]) -> tuple[T, list[list[str]]]:
    """What `call` gives amid training, and kind and name of what it has changed there.

    Training modes, which a step may set itself, and generators that all code draws from are left out.
    """
    with in_training(chunks):
        before = state(chunks)
        answer = call()
        return answer, [row for row in changed(before, state(chunks)) if _of_training(*row)]


def _of_training(kind: str, name: str) -> bool:
    return name.startswith("Megatron's") if kind == "generator" else kind != "training mode"


def changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[list[str]]:
    """Kind and name of what differs. A buffer that no state dict has may be made or grow, as tables of positions do."""
    apart = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    return [
        list(key)
        for key in apart
        if not (isinstance(held := after.get(key), _Table) and held.is_longer(before.get(key)))
    ]


def _generators() -> Iterator[tuple[tuple[str, str], str]]:
    """The states of torch's, numpy's and Python's generators, and of Megatron's trackers if Megatron is there."""
    yield ("generator", "torch's on the CPU"), _digest(torch.get_rng_state())
    numpy = numpy_random.get_state(legacy=False)["state"]
    yield ("generator", "numpy's"), str(hash((numpy["pos"], numpy["key"].tobytes())))
    yield ("generator", "Python's"), str(hash(random.getstate()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield ("generator", "torch's on the GPU"), _digest(torch.cuda.get_rng_state())
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None:
        for name, held in megatron.get_cuda_rng_tracker().get_states().items():
            yield ("generator", f"Megatron's {name}"), _digest(held)


def _settings() -> Iterator[tuple[tuple[str, str], str]]:
    """The settings of torch that hold for all later code, and where Megatron says that this rank is."""
    yield from ((("setting", name), value) for name, value in of_torch().items())
    yield ("setting", "torch.get_float32_matmul_precision()"), _precision()
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        for group, what in itertools.product(_GROUPS, ("rank", "world_size")):
            name = f"get_{group}_{what}"
            yield ("setting", f"parallel_state.{name}()"), str(getattr(state, name)())


def _precision() -> str:
    """Of products of fp32 matrices; what torch says where they have several, of which it tells none."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:
        return str(error)


def _digest(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor) if tensor is None else type(tensor).__name__
    return xxhash.xxh3_64(copied(tensor).reshape(-1).view(torch.uint8).numpy()).hexdigest()
