"""The export plan: which Hugging Face tensors come out, in which order, from which parameters. No collective, no torch.

Every rank makes the same plan from the shard map alone. Names and order depend neither on the layout nor on the rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from moeref.bridge.shard_map import GlobalParam, HFTensor, ShardMap, hashed


class ExportError(RuntimeError):
    """An export that cannot begin: the writer is no rank, or the ranks do not agree. The message names them."""


@dataclass(frozen=True)
class Step:
    """Parameters that are sent together and the Hugging Face tensors made of them: one parameter and its tensors (q, k,
    v of a linear_qkv), or those of all experts and the one fused tensor they fill."""

    params: tuple[GlobalParam, ...]
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True)
class Plan:
    """What an export sends, in order, and the rank that gets it. Raises ExportError for a writer that is no rank."""

    shard_map: ShardMap
    writer: int = 0

    def __post_init__(self) -> None:
        layout = self.shard_map.layout
        if type(self.writer) is not int or not 0 <= self.writer < layout.world:
            raise ExportError(f"writer={self.writer!r} is none of the {layout.world} ranks of {layout.text}")

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """Steps in canonical order."""
        together: dict[tuple[str, ...], list[GlobalParam]] = {}
        for param in self.shard_map.global_params:
            if param.exports:
                together.setdefault(tuple(t.name for t in param.hf), []).append(param)
        return tuple(Step(tuple(params), params[0].hf) for params in together.values())

    @functools.cached_property
    def tensors(self) -> tuple[HFTensor, ...]:
        """Every tensor of the stream in order."""
        return tuple(t for step in self.steps for t in step.tensors)

    @functools.cached_property
    def digest(self) -> int:
        """63 bits of a hash of shard map, tensors and writer. Nothing is sent unless it is equal on all ranks."""
        return hashed(self.shard_map.digest, self.writer, [(t.name, t.shape, t.dtype) for t in self.tensors])
