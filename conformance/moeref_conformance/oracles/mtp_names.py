"""Where files have the tensors of multi-token prediction layers.

DeepSeek-V3 and GLM-4.5 number these layers after the decoder's, and call what is around them `enorm`, `hnorm`,
`eh_proj` and `shared_head.norm`. Qwen3-Next and Qwen3.5 have one, apart under `mtp`, with other names around it and
without copies of embedding and head. Here the first are the standard names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: Families that have them apart, by `model_type`.
APART = ("qwen3_next", "qwen3_5_moe_text")
#: Names there of what is around a layer.
_AROUND = MappingProxyType(
    {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
)
_KEY, _KEYS = "num_nextn_predict_layers", {"qwen3_5_moe_text": "mtp_num_hidden_layers"}
_STANDARD = MappingProxyType({name: standard for standard, name in _AROUND.items()})


def in_files(family: str, layers: int, number: int, rest: str) -> str:
    """The name of `rest`, such as `enorm.weight`, of layer `number` (from 0) after so many decoder layers."""
    if family not in APART:
        return f"model.layers.{layers + number}.{rest}"
    module, _, kind = rest.rpartition(".")
    return f"mtp.{_AROUND[module]}.{kind}" if module in _AROUND else f"mtp.layers.{number}.{rest}"


def prefixes(family: str, layers: int, count: int) -> tuple[str, ...]:
    """What the names of all tensors of so many layers after the decoder's begin with."""
    return ("mtp.",) if family in APART else tuple(f"model.layers.{layers + number}." for number in range(count))


def standard(family: str, layers: int, name: str) -> str:
    """The standard name of a tensor of a file; the names of the decoder's are standard."""
    if family not in APART or not name.startswith("mtp."):
        return name
    if inside := re.match(r"mtp\.layers\.(\d+)\.(.+)$", name):
        return f"model.layers.{layers + int(inside[1])}.{inside[2]}"
    module, _, kind = name.removeprefix("mtp.").rpartition(".")
    return f"model.layers.{layers}.{_STANDARD[module]}.{kind}" if module in _STANDARD else name


def key(family: str) -> str:
    """The key of a config that says how many such layers there are."""
    return _KEYS.get(family, _KEY)


def number(config: Mapping[str, Any]) -> int:
    """How many such layers a Hugging Face config says."""
    return int(config.get(key(str(config.get("model_type")))) or 0)
