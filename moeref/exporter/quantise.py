"""Quantises a stream as in a model's FP8 or INT4 files: linears in e4m3, each block of rows and columns with a scale;
or in INT4 as compressed-tensors packs it (see `bridge.int4_groups`).

As in DeepSeek-V3 (`weight_dequant` of its inference/kernel.py), a weight is the product of what is in the file and
its block's `weight_scale_inv`; blocks at the ends of a matrix are smaller. A scale is the largest magnitude / 448.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moeref.bridge.fp8_blocks import SCALES, Block
from moeref.bridge.int4_groups import IN_WORD, OFFSET, PACKED, SCALE, SHAPE, SHIFTS
from moeref.bridge.named import Named, name_of
from moeref.exporter.plan import ExportError
from moeref.families import UnmappedModelError, loaded
from moeref.families.quantised import FP8Blocks, INT4Groups, read_fp8_blocks, read_int4_groups

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
#: The greatest number of INT4 whose negative it has too.
GREATEST = 7
#: The most elements that are in fp32 at a time, unless a row of blocks has more.
BAND = 1 << 18


def quantised(
    stream: Iterable[Named], config: Mapping[str, Any] | str | Path
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """A stream of (Hugging Face name, tensor) as the FP8 or INT4 files have it that `config` describes.

    stream: `export`, or any other; experts are a tensor each. config: the published model's, with its
    `quantization_config`. A weight is followed by its `weight_scale_inv`, fp32; what stays as it is is passed on. Where
    a tensor is None, on ranks that do not receive it, both are None. `buckets` keeps both together. In INT4 a weight is
    three tensors: `weight_packed`, `weight_scale` and `weight_shape`.

    Raises UnmappedModelError for a config that asks for anything but FP8 (e4m3) in blocks or INT4 in groups, and for
    weights of a layer that such files are not known to quantise or to keep; ExportError for weights that are no matrix
    or hold inf or NaN.
    """
    settings = loaded(config)
    asked = settings.get("quantization_config") or {}
    blocks = read_fp8_blocks(settings)
    if (groups := read_int4_groups(settings)) is not None:
        return _packed(stream, groups)
    if blocks is None:
        raise UnmappedModelError(
            f"{str(settings.get('model_type'))[:100]}: the config asks for {str(asked.get('quant_method'))[:100]} with "
            f"weight_block_size={str(asked.get('weight_block_size'))[:100]}; only FP8 (e4m3) in blocks, with dynamic "
            "activations, and INT4 in groups (pack-quantized, symmetric) are sent"
        )
    return _quantised(stream, blocks)


def _quantised(stream: Iterable[Named], blocks: FP8Blocks) -> Iterator[tuple[str, torch.Tensor | None]]:
    for described, tensor in stream:
        name = name_of(described)
        if not blocks.quantises(name):
            yield name, tensor
        elif tensor is None:
            yield from ((name, None), (name + SCALES, None))
        else:
            weight, scales = quantise(name, tensor, blocks.block, blocks.powers_of_two)
            del tensor  # the stream may use its memory again
            yield name, weight
            yield name + SCALES, scales
            del weight, scales
        tensor = None


def _packed(stream: Iterable[Named], groups: INT4Groups) -> Iterator[tuple[str, torch.Tensor | None]]:
    for described, tensor in stream:
        name = name_of(described)
        if not groups.quantises(name):
            yield name, tensor
        else:
            parts = (None, None, None) if tensor is None else pack(name, tensor, groups.group)
            del tensor  # the stream may use its memory again
            yield from zip((name + end for end in (PACKED, SCALE, SHAPE)), parts, strict=True)
            del parts
        tensor = None


@torch.no_grad()
def pack(name: str, tensor: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix [rows, columns] in INT4: int32 of eight numbers each, the bf16 scales of its groups, its shape as int32.

    A scale is the largest magnitude of `group` columns of a row / 7, and numbers go from -7 to 7. What was loaded from
    such files is sent with the same numbers, where each group has a 7, and scales within a digit of bf16: a group's
    largest weight was rounded. Groups of zeros, or of numbers that are nearly that, have a scale of 1.

    Raises ExportError naming the tensor for anything but a matrix of bf16, fp16 or fp32, and for inf and NaN.
    """
    _check(name, tensor)
    rows, columns = tensor.shape
    words, scales = (tensor.new_empty((rows, -(-columns // of)), dtype=torch.int32) for of in (IN_WORD, group))
    scales = scales.bfloat16()
    step = max(1, BAND // max(columns, 1))
    for first in range(0, rows, step):
        band = slice(first, first + step)
        part = torch.nn.functional.pad(tensor[band].float(), (0, -columns % group))
        parts = part.view(len(part), -1, group)
        largest = parts.abs().amax(-1)
        scales[band] = largest / GREATEST
        scales[band].masked_fill_(scales[band] == 0, 1.0)
        numbers = (parts / scales[band].float()[..., None]).round().clamp(-GREATEST, GREATEST).flatten(1)[:, :columns]
        bits = torch.nn.functional.pad(numbers.int() + OFFSET, (0, -columns % IN_WORD)).view(len(part), -1, IN_WORD)
        words[band] = (bits << SHIFTS.to(bits.device)).sum(-1, dtype=torch.int32)
    if not bool(scales.isfinite().all()):
        raise ExportError(f"{name} holds inf or NaN, which INT4 has no scale for")
    return words, scales, torch.tensor([rows, columns], dtype=torch.int32, device=tensor.device)


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2 or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        what = f"{name} is {tensor.dtype} {list(tensor.shape)}"
        raise ExportError(f"{what}; only matrices of bf16, fp16 or fp32 are quantised")


@torch.no_grad()
def quantise(
    name: str, tensor: torch.Tensor, block: Block, powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3, and the fp32 scales of its blocks. `powers_of_two`: scales are rounded up to these.

    Raises ExportError naming the tensor for anything but a matrix of bf16, fp16 or fp32, and for inf and NaN.
    """
    _check(name, tensor)
    (high, wide), (rows, columns) = block, tensor.shape
    weight = torch.empty_like(tensor, dtype=E4M3, memory_format=torch.contiguous_format)
    scales = tensor.new_empty((-(-rows // high), -(-columns // wide)), dtype=torch.float32)
    step = max(1, BAND // (high * columns))  # rows of blocks
    for first in range(0, len(scales), step):
        band = slice(first * high, (first + step) * high)
        blocks = _blocks(tensor[band], block)
        of_IJ = scales[first : first + step] = _scales(blocks, powers_of_two)
        quotients = blocks.float() / of_IJ[:, None, :, None]
        weight[band] = quotients.flatten(2).flatten(0, 1)[: rows - band.start, :columns]
    if not bool(scales.isfinite().all()):
        raise ExportError(f"{name} holds inf or NaN, which FP8 has no scale for")
    return weight, scales


def _blocks(band: torch.Tensor, block: Block) -> torch.Tensor:
    """[I, rows, J, columns]: I·J whole blocks, filled up with zeros."""
    short = [-size % length for size, length in zip(band.shape, block, strict=True)]
    whole = torch.nn.functional.pad(band, (0, short[1], 0, short[0])) if any(short) else band.contiguous()
    return whole.view(-1, block[0], whole.shape[1] // block[1], block[1])


def _scales(blocks: torch.Tensor, powers_of_two: bool) -> torch.Tensor:
    """The scale of each block [I, J]; 1 for zeros, and for what is so small that its scale would be zero."""
    largest = blocks.abs().amax(1).amax(-1).float()  # both dimensions at once would take four times as long
    scales = largest / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    if powers_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))
    return scales
