"""torch's dtypes by their names in `moeref.dtypes`, which needs no torch, and the bits of tensors."""

from __future__ import annotations

import functools
from typing import Any

import numpy.typing as npt
import torch

from moeref.dtypes import DTYPES

TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
#: The integers in which elements are compared and copied bit for bit, by their bytes: no NaN, no −0, no rounding.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without its package: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements as flat integers: of the tensor's own memory where that is contiguous on the CPU, else of a copy.

    Raises TypeError for what has none: elements of 16 bytes, a sparse or a meta tensor.
    """
    kind = BITS.get(tensor.dtype.itemsize)
    if kind is None or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"{tensor.dtype} ({tensor.layout}, {tensor.device}) has no elements to compare")
    return tensor.detach().contiguous().view(kind).cpu().numpy().ravel()
