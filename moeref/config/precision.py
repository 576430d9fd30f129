"""The settings of megatron-core for each precision, read by the preflight and by the builder."""

from __future__ import annotations

from typing import Any

#: The format `fp8` of each FP8 recipe. With one scale per block e4m3 has enough range for gradients too (DeepSeek-V3,
#: section 3.3). With one scale per tensor gradients need e5m2, which `hybrid` uses.
FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def fp8(recipe: str) -> dict[str, Any]:
    """megatron-core's `fp8` and `fp8_recipe`. Raises KeyError for a recipe that is not in FORMATS."""
    return {"fp8": FORMATS[recipe], "fp8_recipe": recipe}


#: Settings by name: the two plain precisions, then the recipes of quantised GEMMs.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp32": {"bf16": False},
    **{recipe: {"bf16": True, **fp8(recipe)} for recipe in ("tensorwise", "delayed", "mxfp8", "blockwise")},
    "nvfp4": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
