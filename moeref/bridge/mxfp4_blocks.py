"""Experts' weights that a file holds in MXFP4, each block of 32 inputs with a scale: as in gpt-oss.

A weight [experts, in, out] is held by outputs: `_blocks` [experts, out, in / 32, 16] has two numbers in each byte, the
first in the lower four bits, and `_scales` [experts, out, in / 32] an exponent of 2 for each block, as 127 more than it
is. A weight is the product of its number and its block's scale, rounded to bf16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from moeref.bridge.regions import BridgeError, Index, ranges

#: What the names of a weight's parts end with, inputs of a block, bytes of one, and what is added to exponents.
BLOCKS, SCALES = "_blocks", "_scales"
SIZE, BYTES, BIAS = 32, 16, 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The number of each four bits, whose highest is the sign, and the two numbers of each byte.
_NUMBERS = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
PAIRS = torch.tensor([[_NUMBERS[octet & 15], _NUMBERS[octet >> 4]] for octet in range(256)]).bfloat16()
#: The factor that each scale is; the last is none by the standard.
FACTORS = torch.tensor([*(2.0 ** (octet - BIAS) for octet in range(255)), math.nan]).bfloat16()


class BlockedWeight(NamedTuple):
    """Slices of safetensors: the blocks and scales of a weight, with its shape [experts, in, out]."""

    blocks: Any
    scales: Any
    shape: tuple[int, ...]

    def read(self, index: Index) -> torch.Tensor:
        """The bf16 of `index`, of which only the blocks and scales are read that it needs."""
        *_, inputs, _ = ranges(self.shape, index)
        held = (index[0], index[2], slice(inputs.start // SIZE, -(-inputs.stop // SIZE)))
        numbers, factors = PAIRS[self.blocks[held].int()].flatten(-2), FACTORS[self.scales[held].int()]
        weight = (numbers * factors[..., None]).flatten(-2)
        return weight[..., inputs.start % SIZE :][..., : len(inputs)].mT


def paired(name: str, parts: dict[str, Any]) -> BlockedWeight:
    """The weight `name` of `parts` of a folder, from which its two are taken.

    Raises BridgeError where one of them is not there, or does not fit the other.
    """
    blocks, scales = parts.pop(name + BLOCKS, None), parts.pop(name + SCALES, None)
    held = [None if of is None else [*of.get_shape(), of.get_dtype()] for of in (blocks, scales)]
    shape = [] if blocks is None else list(blocks.get_shape())
    if len(shape) != 4 or held != [[*shape[:3], BYTES, "U8"], [*shape[:3], "U8"]]:
        raise BridgeError(
            f"{name} is MXFP4: {name}{BLOCKS} has to be [experts, out, in / {SIZE}, {BYTES}] U8 and {name}{SCALES} "
            f"[experts, out, in / {SIZE}] U8, and they are {held[0]} and {held[1]} (None: not there); download both "
            "again"
        )
    return BlockedWeight(blocks, scales, (shape[0], SIZE * shape[2], shape[1]))
