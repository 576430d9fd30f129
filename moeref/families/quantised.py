"""How the files of a model are quantised, as `quantization_config` in its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.families.model import UnmappedModelError


def fp8_block(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """(rows, columns) of the blocks of FP8 weights that share a scale; None for files that are not quantised.

    Raises UnmappedModelError for files that are quantised otherwise.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    block, kind = given.get("weight_block_size"), str(given.get("quant_method"))[:100]
    sizes = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    plain = given.get("fmt", "e4m3") == "e4m3" and given.get("activation_scheme", "dynamic") == "dynamic"
    if kind != "fp8" or not sizes or not plain:
        raise UnmappedModelError(
            f"{name}: the checkpoint is quantised ({kind}), and only FP8 (e4m3) in blocks is read; turn it into bf16 "
            "first and give that config"
        )
    return block[0], block[1]
