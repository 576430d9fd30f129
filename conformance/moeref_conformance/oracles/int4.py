"""INT4 as compressed-tensors packs it, number by number: checkpoints, and what is within the rounding of what is sent.

Scales of checkpoints are drawn, so that every group tells.

The format: `weight_packed` has eight numbers of a row in each int32, number i in bits 4i to 4i + 3, as number + 8;
`weight_scale` has one scale in bf16 for each group of a row's columns; `weight_shape` is [rows, columns]. Sources: the
pack_quantized helpers of compressed-tensors, and the files of moonshotai/Kimi-K2.5.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from moeref_conformance.contract.requests.int4 import GROUP, PACKED, SCALE, SHAPE

#: Scales are drawn between this number and twice as much: some weights are beyond what INT4 holds, and become 7 or -8.
LEAST = 2.0**-5
#: The greatest number. Scales are the largest magnitude of a group / 7. Those of compressed-tensors are / 7.5: the
#: largest weight is then 7.5 scales and becomes 7, which is off by less than half of a scale that is / 7.
GREATEST = 7
#: Of the largest magnitude of a group, for quotients and scales that are rounded to bf16 before.
SLACK = 2.0**-7
_EXPERT = re.compile(r"(language_model\.)?model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight")


def stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in INT4: three for each matrix of a routed expert, the others as they are."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not _EXPERT.fullmatch(name):
            made[name] = tensor
            continue
        scales = _drawn(name, len(tensor), -(-tensor.shape[1] // GROUP))
        numbers = (tensor.float() / _spread(scales, tensor.shape[1])).round().clamp(-8, 7).long()
        made |= {name + PACKED: packed(numbers), name + SCALE: scales}
        made[name + SHAPE] = torch.tensor(tensor.shape, dtype=torch.int32)
    return made


def loaded(files: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a model in bf16 loads from those of a checkpoint in INT4."""
    made = {name: of for name, of in files.items() if not name.endswith((PACKED, SCALE, SHAPE))}
    for name in (name.removesuffix(PACKED) for name in files if name.endswith(PACKED)):
        rows, columns = files[name + SHAPE].tolist()
        weight = dequantised(files[name + PACKED], files[name + SCALE], (rows, columns))
        made[name] = weight.bfloat16().view(rows, columns)
    return dict(sorted(made.items()))


def quantised(names: Iterable[str]) -> list[str]:
    """The names of the weights that are packed."""
    return [name for name in names if _EXPERT.fullmatch(name)]


def dequantised(words: torch.Tensor, scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The products of numbers and the scales of their groups, in fp32."""
    numbers = torch.tensor([numbers_of(row, shape[1]) for row in words.tolist()])
    return numbers.float() * _spread(scales, shape[1])


def largest(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each group [rows, groups], in fp32."""
    return torch.stack([part.abs().amax(1) for part in torch.split(weight.float(), GROUP, 1)], 1)


def limits(weight: torch.Tensor) -> torch.Tensor:
    """How far each element may be off: half of a scale."""
    return _spread(largest(weight) * (0.5 / GREATEST + SLACK), weight.shape[1])


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """int32 of eight numbers of each row; what is missing in the last is filled up with zero bits."""
    rows = [[word(row[at : at + 8]) for at in range(0, len(row), 8)] for row in numbers.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def word(numbers: list[int]) -> int:
    """The int32 that holds up to eight numbers from -8 to 7."""
    bits = sum((number + 8) << (4 * at) for at, number in enumerate(numbers))
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def numbers_of(words: list[int], columns: int) -> list[int]:
    """The numbers of a row."""
    return [(words[at // 8] >> (4 * (at % 8))) % 16 - 8 for at in range(columns)]


def _spread(scales: torch.Tensor, columns: int) -> torch.Tensor:
    """The scale of each column, in fp32."""
    return torch.stack([scales[:, at // GROUP] for at in range(columns)], 1).float()


def _drawn(name: str, rows: int, groups: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (LEAST * (1 + torch.rand(rows, groups, generator=generator))).bfloat16()
