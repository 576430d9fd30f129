"""The export plan: which Hugging Face tensors come out, in which order, from which parameters. No collective, no torch.

Every rank makes the same plan from the shard map alone. Names and order depend neither on the layout nor on the rank.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from moeref.bridge.shard_map import GlobalParam, HFTensor, ShardMap


@dataclass(frozen=True)
class Step:
    """Parameters that are sent together and the Hugging Face tensors made of them: one parameter and its tensors (q, k,
    v of a linear_qkv), or those of all experts and the one fused tensor they fill."""

    params: tuple[GlobalParam, ...]
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True)
class Plan:
    """What an export sends, in order."""

    shard_map: ShardMap
    writer: int = 0

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
        """63 bits of a hash of tensors, layout and writer. Nothing is sent unless it is equal on all ranks."""
        text = repr((self.shard_map.layout.text, self.writer, [(t.name, t.shape, t.dtype) for t in self.tensors]))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
