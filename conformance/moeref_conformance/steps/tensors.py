"""The tensors of modules, copies of them for a record, and equality of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def module_tensors(chunks: Any) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """(chunk, local name, "parameter" or "buffer", tensor) of every parameter and persistent buffer."""
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield i, name, "parameter", parameter
        for prefix, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield i, f"{prefix}.{name}" if prefix else name, "buffer", buffer


def deepest(chunk: torch.nn.Module) -> torch.nn.Module:
    """The last of the modules that hold a parameter under the most others, such as the last expert's second linear."""
    holders = [name for name, module in chunk.named_modules() if any(module.named_parameters(recurse=False))]
    return chunk.get_submodule(max(reversed(holders), key=lambda name: name.count("."), default=""))


def give_new_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Give tensors new memory with the same values: every second one a new `.data`, the others a new storage.

    Tensors that share a storage share the new one.
    """
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if type(tensor.data) is torch.Tensor and tensor.numel():  # a quantised tensor has parts, and no storage
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for number, (tensor, *others) in enumerate(sharing.values()):
        storage = tensor.untyped_storage()
        if storage.resizable() and (others or number % 2):
            values = storage.clone()  # type: ignore[no-untyped-call]
            storage.resize_(0)
            storage.resize_(values.nbytes())
            storage.copy_(values)
        elif not others:
            tensor.data = tensor.data.clone()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on CPU that shares no memory with anything."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    first, second = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(first, second)
