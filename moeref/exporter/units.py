"""Which tensors a loader needs together, by their Hugging Face names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator

import torch

from moeref.bridge.fp8_blocks import SCALES
from moeref.bridge.named import Named, named

#: What comes before these parts of a name is the unit: all experts of a layer, which a loader stacks; an attention,
#: whose q, k, v (MLA: both down projections) it fuses; a dense or shared MLP, whose gate and up it fuses.
_UNITS = (
    re.compile(r"(.*\.experts)\."),
    re.compile(r"(.*(?:attn|attention))\."),
    re.compile(r"(.*)\.(?:gate|up|down|gate_up)_proj\b"),
)


@functools.lru_cache(maxsize=1 << 17)
def unit_of(name: str) -> str:
    """The unit of a tensor: tensors of one unit stay in one bucket. A tensor of no unit is one by itself, with its
    scales."""
    for pattern in _UNITS:
        if match := pattern.match(name):
            return match[1]
    return name.removesuffix(SCALES)


def closed_up(stream: Iterable[Named], unit: Callable[[str], str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a stream without those that are None; norms amid a unit come after it.

    Megatron keeps a norm with the linear after it: in its order, o_proj is followed by the norm, and then by q_proj.
    """
    key, norms = "", list[tuple[str, torch.Tensor]]()
    for name, tensor in named(stream):
        if unit(name) == name and "norm" in name and key.startswith(_layer(name)):
            norms.append((name, tensor.clone()))  # the stream may use its memory again
            continue
        if unit(name) != key:
            yield from norms
            key, norms = unit(name), []
        yield name, tensor
        del tensor
    yield from norms


def _layer(name: str) -> str:
    """The prefix of a layer, such as `model.layers.3.`; the whole name for a tensor of no layer."""
    match = re.match(r".*?\.layers\.\d+\.", name)
    return match[0] if match else name
