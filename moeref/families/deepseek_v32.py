"""DeepSeek-V3.2: DeepSeek-V3's model with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import deepseek_v3
from moeref.families.indexer import read_indexer, with_indexers
from moeref.families.mla import listed_layers, read_mla
from moeref.families.model import Model
from moeref.families.reading import require

NAME = "deepseek_v32"
MAPPINGS = with_indexers(deepseek_v3.MAPPINGS)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A DeepSeek-V3.2 `config.json` as a `Model`; it has three dense layers if it does not say how many."""
    moe_layers = listed_layers(hf, NAME, require(hf, NAME, "first_k_dense_replace", default=3))
    return replace(read_mla(hf, NAME, dtype, moe_layers), indexer=read_indexer(hf, NAME))
