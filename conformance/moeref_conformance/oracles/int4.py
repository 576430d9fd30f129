"""Checkpoints in INT4 as compressed-tensors packs it, number by number. Scales are drawn, so that every group tells.

The format: `weight_packed` has eight numbers of a row in each int32, number i in bits 4i to 4i + 3, as number + 8;
`weight_scale` has one scale in bf16 for each group of a row's columns; `weight_shape` is [rows, columns]. Sources: the
pack_quantized helpers of compressed-tensors, and the files of moonshotai/Kimi-K2.5.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from moeref_conformance.contract.requests.int4 import GROUP, PACKED, SCALE, SHAPE

#: Scales are drawn between this number and twice as much: some weights are beyond what INT4 holds, and become 7 or -8.
LEAST = 2.0**-5
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight")
#: As Kimi-K2.5's config says it, but for the size of a group.
_CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def config(model: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model that is published in INT4."""
    return {**model, "quantization_config": _CONFIG}


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
        numbers = torch.tensor([numbers_of(words, columns) for words in files[name + PACKED].tolist()])
        made[name] = (numbers.float() * _spread(files[name + SCALE], columns)).bfloat16().view(rows, columns)
    return dict(sorted(made.items()))


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
