"""Weights that a file holds in FP8, each block of rows and columns with a scale: as in DeepSeek-V3 and Kimi-K2.

Computed as in transformers' `Fp8Dequantize`: both factors as fp32, their product rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moeref.bridge.regions import BridgeError

#: (rows, columns) of a block; those at the ends of a tensor may have fewer.
Block = tuple[int, int]
#: safetensors' name of the dtype of quantised weights, and the end of the name of their scales.
FP8, SCALES = "F8_E4M3", "_scale_inv"
#: safetensors' names of the dtypes that scales may have.
SCALE_DTYPES = ("F32", "BF16")


def check_scales(name: str, weight: Any, scales: Any, block: Block) -> None:
    """Raise BridgeError where `scales` (None: not there) are not those of `weight`. Both are slices of safetensors."""
    shape = tuple(weight.get_shape())
    wanted = tuple(-(-size // of) for size, of in zip(shape, block, strict=False))
    found = None if scales is None else (tuple(scales.get_shape()), scales.get_dtype())
    if len(shape) != 2 or found is None or found[0] != wanted or found[1] not in SCALE_DTYPES:
        held = "there is no such tensor" if found is None else f"it is {list(found[0])} {found[1]}"
        raise BridgeError(
            f"{name} is {FP8} {list(shape)}; in blocks of {block[0]} × {block[1]} "
            f"{name}{SCALES} has to be {list(wanted)} {SCALE_DTYPES[0]}, and {held}"
        )


def dequantised(
    read: Callable[[slice, slice], torch.Tensor],
    scales: Callable[[slice, slice], torch.Tensor],
    rows: range,
    columns: range,
    block: Block,
) -> torch.Tensor:
    """The bf16 of `rows` and `columns` of a quantised tensor, made of one row of blocks as fp32 after the other.

    read, scales: give a part of the tensor and of its scales.
    """
    quantised = read(slice(rows.start, rows.stop), slice(columns.start, columns.stop))
    high, wide = block
    first, shift = rows.start // high, columns.start % wide
    scale = scales(slice(first, -(-rows.stop // high)), slice(columns.start // wide, -(-columns.stop // wide)))
    out = torch.empty(quantised.shape, dtype=torch.bfloat16)
    for number, of_row in enumerate(scale.float()):
        start, stop = (edge - rows.start for edge in ((first + number) * high, (first + number + 1) * high))
        band = slice(max(0, start), stop)
        out[band] = quantised[band].float() * of_row.repeat_interleave(wide)[shift : shift + quantised.shape[1]]
    return out
