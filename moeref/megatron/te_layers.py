"""Transformer Engine layers: megatron-core's own layer specs, and checks that they can be built in this process.

Their parameters have the names of `SpecNames(norms="fused")`. A module's quantisation state is its
`_extra_state`, which is in its `state_dict` but is neither a parameter nor a buffer, so no shard map lists it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import get_te_version, is_te_min_version

from moeref.config import ConfigError
from moeref.megatron import gated_delta_net, precision
from moeref.record import Record

#: The first version with grouped linears and with the norm of queries and keys that megatron-core uses.
SINCE = "1.9.0"
#: The first version with attention sinks.
SINKS = "2.8.0"
_DETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def check(record: Record) -> None:
    """Raise ConfigError, with every reason, if this process cannot build the model with Transformer Engine."""
    model, settings = record.model, record.settings
    where = f"{model.family} with kernels='te'"
    if not transformer_engine.HAVE_TE:
        raise ConfigError(
            f"{where}: the package transformer_engine cannot be imported; install transformer-engine[pytorch] for this "
            "torch and CUDA, or use kernels='torch'"
        )
    problems = ["sparse attention is built of plain torch only; use kernels='torch'"] if model.indexer else []
    needs = {"these layers": SINCE, **({"attention sinks": SINKS} if model.sinks else {})}
    if record.precision in precision.SINCE:
        needs[f"fp8_recipe={record.precision!r}"] = precision.SINCE[record.precision]
    for what, since in needs.items():
        if not is_te_min_version(since):
            problems.append(f"{what} need Transformer Engine {since}, this is {get_te_version()}")
    if settings["deterministic_mode"] and os.environ.get(_DETERMINISTIC, "1") != "0":
        problems.append(f"deterministic_mode=True needs {_DETERMINISTIC}=0 in the environment, set before the start")
    if problems:
        raise ConfigError(f"{where}: " + "\n  ".join(problems))


def in_use(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the chunks use Transformer Engine's attention."""
    if not transformer_engine.HAVE_TE:
        return False
    kind = transformer_engine.TEDotProductAttention
    return any(isinstance(module, kind) for chunk in chunks for module in chunk.modules())


def nets(layers: Sequence[ModuleSpec], is_delta: Sequence[bool]) -> list[ModuleSpec]:
    """Layer specs with a gated delta net in place of attention where `is_delta`.

    megatron-core's own spec of this net makes its inner norm zero-centred; in checkpoints it is not.
    """
    linears = transformer_engine.TELayerNormColumnParallelLinear, transformer_engine.TERowParallelLinear
    return gated_delta_net.in_place_of_attention(layers, is_delta, *linears)


def mtp_spec(config: Any, *, moe: bool, mla: bool, vp_stage: int | None) -> Any:
    """megatron-core's own spec of a block of MTP layers."""
    inner = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=mla,
    )
    return get_gpt_mtp_block_spec(config, inner, use_transformer_engine=True, vp_stage=vp_stage)
