"""FP8 recipes: the sequence lengths and widths of linears that their GEMMs support.

The kernels of a recipe need whole blocks. Other sizes fail in a kernel or are silently computed without quantisation,
so they are refused before anything is built or computed.
"""

from __future__ import annotations

import re
from typing import Any

from moeref.bridge import ShardMap
from moeref.config import ConfigError
from moeref.config.precision import FORMATS
from moeref.dispatcher import padding
from moeref.layout import Layout

__all__ = ["FORMATS", "SINCE", "check_length", "check_widths"]

#: The first version of Transformer Engine for which megatron-core's `get_fp8_recipe` accepts each recipe.
SINCE = {"delayed": "1.7.0", "tensorwise": "2.2.0.dev0", "blockwise": "2.3.0.dev0", "mxfp8": "2.1.0"}
_QUANTISED = re.compile(r"\.(linear_\w+|in_proj|out_proj|eh_proj)\.weight\d*$")


def _recipe(config: Any) -> str | None:
    """The name of the FP8 recipe; None without FP8. In megatron-core it is a string or an enum of strings."""
    return str(getattr(config.fp8_recipe, "value", config.fp8_recipe)) if config.fp8 else None


def check_length(config: Any, layout: Layout, length: int) -> None:
    """Raise PaddingError for a sequence whose rows per rank are not a multiple of what the FP8 recipe needs."""
    if (recipe := _recipe(config)) is None:
        return
    plan = padding.plan(layout, recipe=recipe)
    if length % plan.multiple:
        reasons = "; ".join(factor.why for factor in plan.factors)
        raise padding.PaddingError(
            f"a sequence of {length} tokens under {layout.text} is no multiple of {plan.multiple} ({reasons}); "
            f"pad it to {plan.padded(length)}"
        )


def check_widths(shard_map: ShardMap, rank: int, config: Any) -> None:
    """Raise ConfigError for linears of this rank with a width, in or out, that the FP8 recipe does not support."""
    if (recipe := _recipe(config)) is None:
        return
    rows = padding.RECIPES[recipe]
    wrong = [
        f"{shard.local_name} {list(shard.shape)}"
        for shard in shard_map.local_shards(rank)
        if _QUANTISED.search(shard.local_name) and any(width % rows for width in shard.shape)
    ]
    if wrong:
        shown = ", ".join(wrong[:3]) + (f", … ({len(wrong) - 3} more)" if len(wrong) > 3 else "")
        raise ConfigError(
            f"{shard_map.model.family}, rank {rank}, layout {shard_map.layout.text}: {recipe} GEMMs take widths in "
            f"multiples of {rows}, which these linears are not: {shown}; use less of tp and etp, or another recipe"
        )
