"""FP8 recipes: the sequence lengths and widths of linears that their GEMMs support.

The kernels of a recipe need whole blocks. Other sizes fail in a kernel or are silently computed without quantisation,
so they are refused before anything is built or computed.
"""

from __future__ import annotations

from typing import Any

from moeref.bridge import ShardMap
from moeref.config import ConfigError
from moeref.config.precision import recipe, unfit_widths
from moeref.dispatcher import padding
from moeref.layout import Layout

#: The first version of Transformer Engine for which megatron-core's `get_fp8_recipe` accepts each recipe.
SINCE = {"delayed": "1.7.0", "tensorwise": "2.2.0.dev0", "blockwise": "2.3.0.dev0", "mxfp8": "2.1.0"}


def check_length(config: Any, layout: Layout, length: int) -> None:
    """Raise PaddingError for a sequence whose rows per rank are not a multiple of what the FP8 recipe needs."""
    if (found := recipe(vars(config))) is None:
        return
    plan = padding.plan(layout, recipe=found)
    if length % plan.multiple:
        reasons = "; ".join(factor.why for factor in plan.factors)
        raise padding.PaddingError(
            f"a sequence of {length} tokens under {layout.text} is no multiple of {plan.multiple} ({reasons}); "
            f"pad it to {plan.padded(length)}"
        )


def check_widths(shard_map: ShardMap, rank: int, config: Any) -> None:
    """Raise ConfigError for linears of this rank with a width, in or out, that the FP8 recipe does not support."""
    found = recipe(vars(config))
    shards = ((shard.local_name, shard.shape) for shard in shard_map.local_shards(rank))
    if found and (wrong := unfit_widths(shards, found)):
        raise ConfigError(f"{shard_map.model.family}, rank {rank}, layout {shard_map.layout.text}: {wrong}")
