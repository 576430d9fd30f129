"""The settings of megatron-core for each precision, read by the preflight and by the builder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from moeref.dispatcher import padding

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
#: What the widths of linears are multiples of, for each recipe. Blocks of 128 × 128 may reach over the end of a weight:
#: `linear_kv_down_proj` of DeepSeek-V3 and Moonlight has 576 rows, and NeMo-RL trains the latter so (RL 7ea279ab,
#: `grpo-moonlight-16ba3b-4n8g-megatron-fp8-e2e`). Transformer Engine 2.20 asks for multiples of 16 there.
WIDTHS = {**padding.RECIPES, "blockwise": 16}
#: The weights whose GEMMs are quantised.
_QUANTISED = re.compile(r"\.(linear_\w+|in_proj|out_proj|eh_proj)\.weight\d*$")


def recipe(values: Mapping[str, Any]) -> str | None:
    """The recipe of quantised GEMMs in effective settings or in the fields of a config; None without FP8 and FP4."""
    for kind, default in (("fp8", None), ("fp4", "nvfp4")):
        if values.get(kind):
            found = values.get(f"{kind}_recipe", default)
            return str(getattr(found, "value", found))  # megatron-core has a string or an enum of strings
    return None


def unfit_widths(shards: Iterable[tuple[str, tuple[int, ...]]], recipe: str) -> str:
    """Why linears with these names and shapes cannot be computed under `recipe`; "" if they can.

    Other widths fail in a kernel or are silently computed without quantisation.
    """
    multiple = WIDTHS[recipe]
    wrong = [
        f"{name} {list(shape)}"
        for name, shape in shards
        if _QUANTISED.search(name) and any(width % multiple for width in shape)
    ]
    if not wrong:
        return ""
    shown = ", ".join(wrong[:3]) + (f", … ({len(wrong) - 3} more)" if len(wrong) > 3 else "")
    return (
        f"{recipe} GEMMs take widths in multiples of {multiple}, which these linears are not: {shown}; "
        "use less of tp and etp, or another recipe"
    )
