"""Which settings the tables speak of, so that their silence means that megatron-core's config classes accept them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeref.config.core import known_fields
from moeref.config.effective import same
from moeref.config.setting import Setting
from moeref.config.settings import ATTRIBUTES
from moeref.dispatcher.from_config import SETTINGS

#: Settings of which every refusal is in a table of `rules`, `core_rules` or `moeref.dispatcher`, as long as the
#: settings that are neither here nor free keep their defaults.
COVERED = frozenset(SETTINGS.values()) | {
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "moe_layer_recompute"),
    *("distribute_saved_activations", "fine_grained_activation_offloading", "offload_modules"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_pre_softmax", "moe_aux_loss_coeff", "moe_router_padding_for_fp8", "moe_enable_routing_replay"),
    *("moe_router_fusion", "moe_router_dtype", "moe_grouped_gemm", "bf16"),
    *("fp8", "fp8_recipe", "fp8_param", "fp4", "fp4_recipe", "fp4_param", "first_last_layers_bf16", "fp8_output_proj"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"),
    *("mtp_num_layers", "overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush"),
    *("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "gradient_accumulation_fusion"),
    *("apply_rope_fusion", "rotary_interleaved", "cache_mla_latents", "fused_single_qkv_rope", "attention_backend"),
    *("cp_comm_type", "attention_dropout", "hidden_dropout", "bias_activation_fusion", "use_te_activation_func"),
    *("activation_func_fp8_input_store", "ffn_hidden_size"),
}

#: Settings that a config takes and layers may refuse.
_OF_LAYERS = frozenset({"heterogeneous_block_specs"})


def uncovered(trails: Mapping[str, tuple[Setting, ...]], core: str, *, mla: bool = False) -> tuple[str, ...]:
    """Names of settings that were asked for and of which no table says whether that version's config takes them.

    A value that moeref would set, or that Megatron has by default, is covered. A setting is free if `__post_init__`
    does not read it before a refusal and it has a type that is checked.
    """
    known = known_fields(core, mla=mla)
    return tuple(
        name
        for name, (*before, setting) in trails.items()
        if setting.asked
        and name not in COVERED | ATTRIBUTES
        and not any(same(one.value, setting.value) for one in before)
        and (name in _OF_LAYERS or not _free(known.get(name, {}), setting.value))
    )


def _free(field: Mapping[str, Any], value: Any) -> bool:
    if field.get("checked") or not {"type", "choices"} & field.keys():
        return False
    if value is None:
        return False  # the default is another value, so this field may have no None
    return not isinstance(value, int | float) or 0 <= value < math.inf
