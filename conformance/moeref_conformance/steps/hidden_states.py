"""Records the hidden states that enter the norms of the decoder, which say what comes before a layer and after it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

#: The norms before the attention and the MLP of a layer, which is one up from them, and the norm after all layers.
NORM = re.compile(r"\bdecoder\.(?:layers\.\d+\.(input_layernorm|pre_mlp_layernorm)|final_layernorm)$")


@contextmanager
def entering_norms(chunks: Sequence[torch.nn.Module], into: dict[str, torch.Tensor], prefix: str) -> Iterator[None]:
    """Record as `prefix.NUMBER` the rows [T, H] that enter a norm; numbers follow the decoder, two a layer.

    The norm after all layers is `prefix.last`. Rows of a second microbatch follow those of the first. A norm that is
    fused into the layer after it is an identity here, and its rows are the same.
    """
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def keep(key: str) -> Any:
        return lambda _, args: rows[key].append(args[0].detach().reshape(-1, args[0].shape[-1]).cpu().clone())

    handles = [norm.register_forward_pre_hook(keep(key)) for chunk in chunks for key, norm in _norms(chunk)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        into |= {f"{prefix}.{key}": torch.cat(parts) for key, parts in rows.items()}


def _norms(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The norms of a chunk by number, and `last`."""
    for name, module in chunk.named_modules():
        if match := NORM.search(name):
            layer: Any = chunk.get_submodule(name.rpartition(".")[0])
            number = 2 * (layer.layer_number - 1) + (match[1] == "pre_mlp_layernorm") if match[1] else "last"
            yield str(number), module
