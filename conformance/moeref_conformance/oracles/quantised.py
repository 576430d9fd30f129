"""FP8 by its definition, block by block: which tensors have scales, and what is within the rounding of e4m3.

And checkpoints in FP8, whose scales are drawn, so that every block tells where it belongs.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moeref_conformance.contract.requests.quantised import SCALES

#: The largest number of float8_e4m3fn, half a step of its mantissa, and half of its smallest number.
LARGEST, MANTISSA, SMALLEST = 448.0, 2.0**-4, 2.0**-10
#: Scales that are rounded up to powers of two are up to twice as large as they need be.
POWERS_OF_TWO = 2.0
#: For quotients and scales that are rounded to bf16 before.
SLACK = 1 + 2.0**-4
#: The linears of layers. Routers, norms and what is outside of layers is not among them.
_LINEAR = re.compile(
    r"(model|mtp)\.layers\.\d+\."
    r"((self_attn|mlp)\.(.+\.)?[a-z_]+_proj(_with_mqa)?|self_attn\.indexer\.(wq_b|wk)"
    r"|block_sparse_moe\.experts\.\d+\.w[123]"
    r"|linear_attn\.(in_proj_[a-z]+|out_proj))"
)


#: Scales of a checkpoint are drawn between this number and twice as much.
LEAST = 1e-3
#: Families whose files have scales in bf16; those of DeepSeek-V3's are fp32.
OF_BF16 = ("qwen3_5_moe_text", "qwen3_moe", "qwen3_next")


def stored(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in FP8: weights, and their scales beside them. What has none stays as it is."""
    made, block = dict(tensors), tuple(config["quantization_config"]["weight_block_size"])
    for name in quantised(config, tensors):
        scales = _drawn(name, grid(tensors[name].shape, block))
        made[f"{name}{SCALES}"] = scales.bfloat16() if config["model_type"] in OF_BF16 else scales
        by_block = dequantised(torch.ones(tensors[name].shape), made[f"{name}{SCALES}"], block)
        made[name] = (tensors[name].float() / by_block).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return made


def loaded(config: Mapping[str, Any], files: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a model in bf16 loads from those of a checkpoint in FP8."""
    block = tuple(config["quantization_config"]["weight_block_size"])
    return {
        name: dequantised(of, files[f"{name}{SCALES}"], block).bfloat16() if of.dtype == torch.float8_e4m3fn else of
        for name, of in files.items()
        if not name.endswith(SCALES)
    }


def _drawn(name: str, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return LEAST * (1 + torch.rand(tuple(shape), generator=generator))


def quantised(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the weights that have scales."""
    kept = config["quantization_config"].get("modules_to_not_convert", ())

    def stays(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in kept)

    modules = {name: name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    return [name for name, module in modules.items() if _LINEAR.fullmatch(module) and not stays(module)]


def grid(shape: Sequence[int], block: tuple[int, int]) -> list[int]:
    """Blocks of a matrix, from top to bottom and from left to right, those at the ends included."""
    return [math.ceil(size / of) for size, of in zip(shape, block, strict=True)]


def blocks(matrix: torch.Tensor, block: tuple[int, int]) -> list[list[torch.Tensor]]:
    """The blocks of a matrix, in rows."""
    return [list(torch.split(row, block[1], 1)) for row in torch.split(matrix, block[0], 0)]


def largest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, in fp32."""
    return torch.tensor([[float(part.abs().max()) for part in row] for row in blocks(weight, block)])


def next_power(scales: torch.Tensor) -> torch.Tensor:
    """The powers of two that are no smaller than positive scales."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def limits(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """How far each element may be off: half a step of e4m3 at its magnitude, or of the smallest numbers of its block.

    A block's scale is its largest magnitude / LARGEST, or the next power of two.
    """
    smallest = POWERS_OF_TWO / LARGEST * SMALLEST

    def limit(part: torch.Tensor) -> torch.Tensor:
        return (part * MANTISSA).clamp_min(float(part.max()) * smallest) * SLACK

    return torch.cat([torch.cat([limit(part) for part in row], 1) for row in blocks(weight.float().abs(), block)])


def dequantised(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The products of weights and the scales of their blocks, in fp32."""
    rows = zip(blocks(weight.float(), block), scales.float(), strict=True)
    return torch.cat([torch.cat([part * scale for part, scale in zip(*row, strict=True)], 1) for row in rows])
