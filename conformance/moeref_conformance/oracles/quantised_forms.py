"""The forms in which engines are sent weights: of what tensors a weight is made there, and how exact it is.

A form is numbers of a format, each `block` of rows and columns with a scale. `numbers`, `scales` and `shape` are the
ends of the names of a weight's tensors; `powers`: its scales are powers of two. `needed` are the scales of a weight:
one may be smaller, where `limits` allows that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeref_conformance.contract.requests import int4 as int4_request
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.oracles import int4, quantised

#: A tensor's dtypes, by name, of which it may have any, and its shape.
Kind = tuple[tuple[str, ...], list[int]]


@dataclass(frozen=True)
class FP8Blocks:
    """e4m3 as DeepSeek-V3 is published in, for the config that asks for it."""

    config: Mapping[str, Any]
    name, rounding = "FP8", "the rounding of e4m3"
    numbers, scales, shape = "", request.SCALES, None

    @property
    def block(self) -> tuple[int, int]:
        high, wide = self.config["quantization_config"]["weight_block_size"]
        return high, wide

    @property
    def powers(self) -> bool:
        return bool(self.config["quantization_config"].get("scale_fmt") == "ue8m0")

    def quantised(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        return frozenset(quantised.quantised(self.config, tensors))

    def of_numbers(self, shape: Sequence[int]) -> Kind:
        return ("float8_e4m3fn",), list(shape)

    def of_scales(self, shape: Sequence[int]) -> Kind:
        """In fp32 as DeepSeek's, or bf16 as Qwen's; by name: torch 2.6 has no dtype of nothing but powers of two."""
        dtypes = ("float32", "bfloat16", *(["float8_e8m0fnu"] if self.powers else []))
        return dtypes, quantised.grid(shape, self.block)

    def weight(self, numbers: torch.Tensor, scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return quantised.dequantised(numbers, scales, self.block)

    def limits(self, weight: torch.Tensor) -> torch.Tensor:
        return quantised.limits(weight, self.block)

    def needed(self, weight: torch.Tensor) -> torch.Tensor:
        scales = quantised.largest(weight, self.block) / quantised.LARGEST
        return quantised.next_power(scales) if self.powers else scales


@dataclass(frozen=True)
class INT4Groups:
    """Eight numbers of a row in each int32, as Kimi-K2.5 is published in."""

    name, rounding, powers = "INT4", "the rounding of INT4", False
    numbers, scales, shape = int4_request.PACKED, int4_request.SCALE, int4_request.SHAPE
    block = (1, int4_request.GROUP)

    def quantised(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        return frozenset(int4.quantised(tensors))

    def of_numbers(self, shape: Sequence[int]) -> Kind:
        return ("int32",), quantised.grid(shape, (1, 8))

    def of_scales(self, shape: Sequence[int]) -> Kind:
        """In bf16 as the files' are; engines cast others as they load them."""
        return ("bfloat16", "float16", "float32"), quantised.grid(shape, self.block)

    def weight(self, numbers: torch.Tensor, scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return int4.dequantised(numbers, scales, shape)

    def limits(self, weight: torch.Tensor) -> torch.Tensor:
        return int4.limits(weight)

    def needed(self, weight: torch.Tensor) -> torch.Tensor:
        return int4.largest(weight) / int4.GREATEST


Form = FP8Blocks | INT4Groups


def form(family: str, model: Mapping[str, Any]) -> Form:
    """The form that a family is sent in, whose published config asks for none."""
    return INT4Groups() if family in int4_request.FAMILIES else FP8Blocks(request.config(model))
