"""GLM-5, 5.1 and 5.2: GLM-4.7-Flash's model with sparse attention; in 5.2 some layers share an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families import glm4_moe_lite
from moeref.families.indexer import read_sparse, with_indexers
from moeref.families.model import Model

NAME = "glm_moe_dsa"
MAPPINGS = with_indexers(glm4_moe_lite.MAPPINGS)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A GLM-5 `config.json` as a `Model`; it has three dense layers if it does not say how many."""
    return read_sparse(hf, NAME, dtype)
