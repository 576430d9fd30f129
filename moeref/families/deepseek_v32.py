"""DeepSeek-V3.2: DeepSeek-V3's model with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import deepseek_v3
from moeref.families.indexer import read_sparse, with_indexers
from moeref.families.model import Model

NAME = "deepseek_v32"
MAPPINGS = with_indexers(deepseek_v3.MAPPINGS)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A DeepSeek-V3.2 `config.json` as a `Model`; it has three dense layers if it does not say how many."""
    return read_sparse(hf, NAME, dtype)
