"""Checkpoints with experts in MXFP4, number by number: what files hold, and what is loaded of it.

Scales are drawn, so that every block tells. Zeros have no sign, which some readers do not keep.

The format: a weight [experts, in, out] is held as [experts, out, in]. `_blocks` [experts, out, in / 32, 16] has two
numbers in a byte, the first in the lower four bits: a sign, two bits of an exponent and one of a mantissa (e2m1).
`_scales` [experts, out, in / 32] has an exponent of 2 for each block of 32, as 127 + exponent (e8m0). Sources: the OCP
Microscaling Formats, and the files of openai/gpt-oss-20b.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

import torch

from moeref_conformance.contract.requests.mxfp4 import BLOCKS, SCALES

#: Numbers of a block, and what is added to the exponent of a scale.
SIZE, BIAS = 32, 127
#: Exponents are drawn from these: some weights are beyond what MXFP4 holds, and become 6 or -6 scales.
EXPONENTS = (-6, -3)
_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")


def number(code: int) -> float:
    """The number of four bits."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if sign else magnitude


_NUMBERS = [number(code) for code in range(16)]


def stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in MXFP4: two for each weight of all experts, the others as they are."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not _EXPERTS.fullmatch(name):
            made[name] = tensor
            continue
        rows_EOI = tensor.float().transpose(1, 2).contiguous()
        parts_EOBS = rows_EOI.view(*rows_EOI.shape[:2], -1, SIZE)
        exponents_EOB = _drawn(name, parts_EOBS.shape[:3])
        made[name + BLOCKS] = packed(nearest(parts_EOBS / 2.0 ** exponents_EOB[..., None]))
        made[name + SCALES] = (exponents_EOB + BIAS).to(torch.uint8)
    return made


def loaded(files: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a model in bf16 loads from those of a checkpoint in MXFP4."""
    made = {name: of for name, of in files.items() if not name.endswith((BLOCKS, SCALES))}
    for name in (name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)):
        made[name] = dequantised(files[name + BLOCKS], files[name + SCALES])
    return dict(sorted(made.items()))


def nearest(quotients: torch.Tensor) -> torch.Tensor:
    """The code of the number that is nearest to each quotient."""
    magnitudes = torch.tensor(_NUMBERS[:8])
    codes = (quotients.abs()[..., None] - magnitudes).abs().argmin(-1)
    return torch.where((quotients < 0) & (codes > 0), codes + 8, codes)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes each."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The products of numbers and the scales of their blocks, in bf16, as [experts, in, out]."""
    octets, shape = blocks.flatten().tolist(), (*scales.shape, SIZE)
    numbers = torch.tensor([_NUMBERS[code] for octet in octets for code in (octet & 15, octet >> 4)])
    factors = torch.tensor([2.0 ** (scale - BIAS) for scale in scales.flatten().tolist()])
    weight = numbers.view(shape) * factors.view(*scales.shape, 1)
    return weight.flatten(2).transpose(1, 2).bfloat16().contiguous()


def _drawn(name: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    least, most = EXPONENTS
    return torch.randint(least, most + 1, shape, generator=generator)
