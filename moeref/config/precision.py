"""Owns what a precision is in megatron-core's settings: the preflight foretells them, a built model is given them."""

from __future__ import annotations

from typing import Any

#: `fp8` of each FP8 recipe. Blocks have scales of their own, so gradients need no wider range (DeepSeek-V3, section
#: 3.3); one scale a tensor needs e5m2 for them, which `hybrid` gives.
FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def fp8(recipe: str) -> dict[str, Any]:
    """megatron-core's `fp8` and `fp8_recipe`. Raises KeyError for a recipe that is not in FORMATS."""
    return {"fp8": FORMATS[recipe], "fp8_recipe": recipe}


#: By name, two plain precisions and the recipes of quantised GEMMs.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp32": {"bf16": False},
    **{recipe: {"bf16": True, **fp8(recipe)} for recipe in ("tensorwise", "delayed", "mxfp8", "blockwise")},
    "nvfp4": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
