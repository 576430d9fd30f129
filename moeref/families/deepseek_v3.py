"""DeepSeek-V3 (also V3.1, R1, Moonlight): MLA, a dense prefix, shared experts, sigmoid router limited to expert groups.

Multi-token prediction layers included; the published checkpoints are FP8 and have to be turned into bf16 first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import mla
from moeref.families.model import Model
from moeref.families.reading import require

NAME = "deepseek_v3"
MAPPINGS = mla.MAPPINGS


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A DeepSeek-V3 `config.json` as a `Model`; without `q_lora_rank` (Moonlight) queries have no latent."""
    layers, prefix = require(hf, NAME, "num_hidden_layers"), require(hf, NAME, "first_k_dense_replace", default=3)
    return mla.read_mla(hf, NAME, dtype, tuple(i >= prefix for i in range(layers)))
