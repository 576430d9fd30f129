"""Streams of named tensors, as exporters and `Checkpoint.tensors` yield them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from moeref.bridge.shard_map import HFTensor

#: The Hugging Face name of a tensor, or its description, and the tensor; None on a rank that does not receive it.
Named = tuple[str | HFTensor, torch.Tensor | None]


def name_of(described: str | HFTensor) -> str:
    """The Hugging Face name."""
    return described if isinstance(described, str) else described.name


def named(stream: Iterable[Named]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a stream, without those that are None."""
    for described, tensor in stream:
        if tensor is not None:
            yield name_of(described), tensor
            del tensor  # the stream may use its memory again
