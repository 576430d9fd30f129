"""Weights that a file holds in INT4, each group of a row's columns with a scale: as in Kimi-K2-Thinking and Kimi-K2.5.

As compressed-tensors packs them (`pack-quantized`, symmetric): `weight_packed` has eight numbers of a row in each
int32, the first in the lowest four bits, each 8 more than it is; `weight_shape` has the rows and columns. A weight is
the product of its number and its group's `weight_scale`, rounded to bf16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moeref.bridge.regions import BridgeError, Index, ranges

#: What the names of a weight's parts end with, after `weight`, and numbers in one int32.
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
IN_WORD = 8
#: The bits of an int32 at which its numbers begin, and what is added to each.
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
OFFSET = 8


class PackedWeight(NamedTuple):
    """Slices of safetensors: the packed numbers and the scales of a weight, with its shape and a group's columns."""

    packed: Any
    scale: Any
    shape: tuple[int, ...]
    group: int

    def read(self, index: Index) -> torch.Tensor:
        """The bf16 of `index`, of which only the words and scales are read that it needs."""
        (rows, columns), group = ranges(self.shape, index), self.group
        words = slice(columns.start // IN_WORD, -(-columns.stop // IN_WORD))
        groups = slice(columns.start // group, -(-columns.stop // group))
        at = slice(rows.start, rows.stop)
        numbers = unpacked(self.packed[at, words])[:, columns.start % IN_WORD :][:, : len(columns)]
        scales = self.scale[at, groups].repeat_interleave(group, 1)[:, columns.start % group :][:, : len(columns)]
        weight: torch.Tensor = numbers.float() * scales.float()
        return weight.bfloat16()


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """[rows, 8 · words] numbers from -8 to 7 of int32 [rows, words]."""
    return (((words[..., None] >> SHIFTS) & 15) - OFFSET).flatten(1)


def paired(name: str, parts: dict[str, Any], group: int) -> PackedWeight:
    """The weight `name` of `parts` of a folder, from which its three are taken.

    Raises BridgeError where one of them is not there, or does not fit the others.
    """
    packed, scale, shape = (parts.pop(name + end, None) for end in (PACKED, SCALE, SHAPE))
    size = [] if shape is None or list(shape.get_shape()) != [2] else [int(n) for n in shape[:]]
    want = [list[int](), list[int]()]
    if len(size) == 2:
        want = [[size[0], -(-size[1] // of)] for of in (IN_WORD, group)]
    held = [None if of is None else [*of.get_shape(), of.get_dtype()] for of in (packed, scale)]
    if len(size) != 2 or held != [[*want[0], "I32"], [*want[1], "BF16"]]:
        found = "no such tensor" if shape is None else str(size or list(shape.get_shape()))
        raise BridgeError(
            f"{name} is INT4 in groups of {group}: {name}{SHAPE} is {found}, for which {name}{PACKED} has to be "
            f"{want[0]} I32 and {name}{SCALE} {want[1]} BF16, and they are {held[0]} and {held[1]}"
        )
    return PackedWeight(packed, scale, (size[0], size[1]), group)
