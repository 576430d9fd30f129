"""GLM-4.7-Flash: DeepSeek-V3's table with plain rope; transformers 5 lists dense layers in `mlp_layer_types`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import deepseek_v3
from moeref.families.mla import listed_layers, read_mla
from moeref.families.model import FamilyError, Model
from moeref.families.reading import require

NAME = "glm4_moe_lite"
#: DeepSeek-V3's table.
MAPPINGS = deepseek_v3.MAPPINGS


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A GLM-4.7-Flash `config.json` as a `Model`; the published one gives `first_k_dense_replace`."""
    prefix = require(hf, NAME, "first_k_dense_replace", default=1)
    if prefix != 1 and not hf.get("mlp_layer_types"):
        # transformers 5 reads `mlp_layer_types` alone, and without it makes one layer dense whatever the prefix says.
        raise FamilyError(f"{NAME}: first_k_dense_replace={prefix} is read differently elsewhere; give mlp_layer_types")
    return read_mla(hf, NAME, dtype, listed_layers(hf, NAME, prefix))
