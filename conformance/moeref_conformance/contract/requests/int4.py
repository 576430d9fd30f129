"""Names and sizes of the experts that a checkpoint has in INT4, or that are sent in it, and the config that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What the names of a weight's three tensors end with.
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
#: Columns of a group. Experts have 40 and 56, of which an ETP rank's half ends inside of a group and of a word.
GROUP = 8
#: Families that are published in INT4 alone.
FAMILIES = ("kimi_k25",)
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
    """The config of a model that is published in INT4; of a text model beside a vision model inside of the whole."""
    if "text_config" in model:
        return {**model, "text_config": config(model["text_config"])}
    return {**model, "quantization_config": _CONFIG}
