"""The tensors of modules, copies of them for a record, and equality of bytes."""

from __future__ import annotations

from collections.abc import Iterator
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


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on CPU that shares no memory with anything."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(copied(a).reshape(-1).view(torch.uint8), copied(b).reshape(-1).view(torch.uint8))
