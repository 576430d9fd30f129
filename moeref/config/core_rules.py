"""The table of settings that megatron-core's config classes refuse, besides those of `rules` and of dispatchers.

Every row is a refusal of `__post_init__` in 0.16 or 0.19. `COVERED` names the settings of which every refusal is in one
of the tables, as long as other settings keep their defaults. Settings that neither this nor `fields/` knows to be free
are `moeref.config.coverage`'s to name. `tests/upstream/test_preflight_against_megatron.py` compares the tables with
real configs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeref.config.rule import Effective, Rule

_CONFIG, _BASE, _MLA = (f"{kind}.__post_init__" for kind in ("TransformerConfig", "ModelParallelConfig", "MLA config"))
_GRANULARITY, _METHOD, _LAYERS = "recompute_granularity", "recompute_method", "recompute_num_layers"
_MODULES, _OFFLOAD, _OFFLOADED = "recompute_modules", "fine_grained_activation_offloading", "offload_modules"
_GROUPS, _GROUP_TOPK, _OVERLAP = "moe_router_num_groups", "moe_router_group_topk", "overlap_moe_expert_parallel_comm"
_SHARED_OVERLAP, _WGRAD, _DEFER = "moe_shared_expert_overlap", "delay_wgrad_compute", "defer_embedding_wgrad_compute"
_MTP, _ROPE, _LATENT = "mtp_num_layers", "apply_rope_fusion", "multi_latent_attention"
_FLUSH, _RELEASE = "overlap_p2p_comm_warmup_flush", "ep_overlap_early_attn_memory_release"
_DISPATCHER, _ACTIVATION = "moe_token_dispatcher_type", "use_te_activation_func"
_YARN = ("beta_fast", "beta_slow", "rotary_base", "rotary_scaling_factor", "original_max_position_embeddings")

#: What may be computed again, and what may be offloaded; the last name of each is new in 0.19.
RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
OFFLOADED = (
    *("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "fused_group_mlp"),
)
BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing")
BACKENDS = ("flash", "fused", "unfused", "local", "auto")


def _selective(now: Effective) -> bool:
    return bool(now[_GRANULARITY] == "selective" or now["moe_layer_recompute"])


def _listed(now: Effective, name: str) -> tuple[str, ...]:
    """The names in a list of modules; empty for anything else."""
    value = now[name]
    return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else ()


def _no_list(now: Effective, name: str) -> bool:
    value = now[name]
    return value is not None and (not isinstance(value, list) or len(_listed(now, name)) < len(value))


def _known(now: Effective, names: Sequence[str]) -> Sequence[str]:
    return names[:-1] if now["core"] == "0.16" else names


def _recomputed(now: Effective, *modules: str) -> bool:
    """Whether one of `modules` is computed again."""
    held = _listed(now, _MODULES)
    also = now["moe_layer_recompute"] and "moe" in modules
    return _selective(now) and (bool(also) or not set(modules).isdisjoint(held))


def _offloads(now: Effective, *modules: str) -> bool:
    return bool(now[_OFFLOAD]) and not set(modules).isdisjoint(_listed(now, _OFFLOADED))


def _groups(now: Effective) -> bool:
    groups, chosen, experts = now[_GROUPS], now[_GROUP_TOPK], now["num_moe_experts"]
    return bool(chosen and experts) and (not groups or groups < 0 or experts % groups != 0 or chosen > groups)


def _balanced(now: Effective) -> bool:
    kinds = now["moe_router_load_balancing_type"]
    known = _known(now, BALANCING)
    return all(kind in known[:4] for kind in kinds) if isinstance(kinds, list) else kinds is None or kinds in known


def _too_many_mtp(now: Effective) -> bool:
    return now[_MTP] not in ((None, 1) if now["core"] == "0.16" else (None, 0, 1))


def _flat(now: Effective) -> bool:
    return now["core"] == "0.16" and now[_MTP] == 1 and now.layout.pp == 1


def _cp_kinds(now: Effective) -> bool:
    kinds: Any = now["cp_comm_type"]
    if now.layout.cp == 1 or kinds is None:
        return False
    return len(kinds) != now["num_layers"] if isinstance(kinds, list) else not isinstance(kinds, str)


def _not_positive(now: Effective) -> bool:
    if not now[_LATENT] or now["rope_type"] != "yarn":
        return False
    return any(now[name] is not None and now[name] <= (name == "rotary_base") for name in _YARN)


def _bf16_ends(now: Effective) -> bool:
    each = (now["num_layers"] or 0) // now.layout.pp
    ends = (now["num_layers_at_start_in_bf16"], now["num_layers_at_end_in_bf16"])
    return any(end is not None and not 0 <= end <= each for end in ends)


RULES: tuple[Rule, ...] = (
    # Recomputation
    Rule(
        "full-recompute-needs-method", "run", (_GRANULARITY, _METHOD),
        "full recomputation needs a method",
        "ask for recompute_method='uniform' or 'block'", _CONFIG,
        lambda now: now[_GRANULARITY] == "full" and now[_METHOD] is None,
    ),
    Rule(
        "full-recompute-needs-layers", "run", (_GRANULARITY, _LAYERS),
        "full recomputation needs a number of layers",
        "ask for recompute_num_layers=1", _CONFIG,
        lambda now: now[_GRANULARITY] == "full" and now[_LAYERS] is None,
    ),
    Rule(
        "selective-recompute-has-no-layers", "run", (_GRANULARITY, _LAYERS),
        "selective recomputation takes modules, not a number of layers",
        "drop recompute_num_layers", _CONFIG,
        lambda now: now[_GRANULARITY] == "selective" and now[_LAYERS] is not None,
    ),
    Rule(
        "recompute-modules-is-a-list", "run", (_MODULES,),
        "modules are a list of names",
        'write ["core_attn"]', _CONFIG,
        lambda now: _no_list(now, _MODULES),
    ),
    Rule(
        "recompute-modules-are-known", "run", (_MODULES, "core"),
        f"known modules are {', '.join(RECOMPUTED)} (the last from 0.19)",
        "name one of these", "TransformerConfig, which ignores others under moe_layer_recompute",
        lambda now: _selective(now) and not set(_listed(now, _MODULES)) <= set(_known(now, RECOMPUTED)),
    ),
    Rule(
        "moe-act-needs-grouped", "run", (_MODULES, "moe_grouped_gemm"),
        "the activation of experts is computed again only with grouped GEMM",
        "drop moe_act, or ask for moe_grouped_gemm=True", _CONFIG,
        lambda now: now[_GRANULARITY] == "selective" and _recomputed(now, "moe_act") and not now["moe_grouped_gemm"],
    ),
    Rule(
        "mla-up-proj-needs-mla", "run", (_MODULES, _LATENT),
        "mla_up_proj is a part of multi-latent attention, which the model lacks",
        "drop mla_up_proj", _CONFIG,
        lambda now: now[_GRANULARITY] == "selective" and _recomputed(now, "mla_up_proj") and not now[_LATENT],
    ),
    Rule(
        "gdn-norm-out-needs-gdn", "run", (_MODULES,),
        "gdn_norm_out is a part of gated delta nets, which the model lacks",
        "drop gdn_norm_out", _CONFIG,
        lambda now: now[_GRANULARITY] == "selective"
        and _recomputed(now, "gdn_norm_out")
        and now["experimental_attention_variant"] != "gated_delta_net",
    ),
    Rule(
        "recomputed-shared-experts-do-not-overlap", "run", (_MODULES, _SHARED_OVERLAP),
        "shared experts that overlap with dispatch cannot be computed again",
        "drop one of them", _CONFIG,
        lambda now: now[_GRANULARITY] == "selective"
        and _recomputed(now, "shared_experts")
        and now[_SHARED_OVERLAP]
        and now["moe_shared_expert_intermediate_size"] is not None,
    ),
    Rule(
        "delayed-scaling-is-not-recomputed", "run", (_MODULES, "fp8", "fp8_recipe"),
        "delayed scaling cannot compute moe_act and layernorm again",
        "drop these modules, or use another recipe", "TransformerConfig, which does not look under moe_layer_recompute",
        lambda now: bool(now["fp8"]) and now["fp8_recipe"] == "delayed" and _recomputed(now, "moe_act", "layernorm"),
    ),
    Rule(
        "moe-layer-recompute-is-selective", "run", ("moe_layer_recompute", _GRANULARITY),
        "full recomputation has the MoE layers already",
        "drop moe_layer_recompute", _CONFIG,
        lambda now: now["moe_layer_recompute"] and now[_GRANULARITY] == "full",
    ),
    Rule(
        "saved-activations-need-no-sp", "run", ("distribute_saved_activations", "sequence_parallel", _GRANULARITY),
        "sequence parallelism distributes them already",
        "drop distribute_saved_activations", _CONFIG,
        lambda now: now["distribute_saved_activations"] and now["sequence_parallel"] and now[_GRANULARITY] is not None,
    ),
    # Offloading
    Rule(
        "offloading-needs-modules", "run", (_OFFLOAD, _OFFLOADED, "core"),
        f"it needs a list of modules out of {', '.join(OFFLOADED)} (the last from 0.19)",
        'ask for offload_modules, such as ["moe_act"]', _CONFIG,
        lambda now: now[_OFFLOAD]
        and (not _listed(now, _OFFLOADED) or not set(_listed(now, _OFFLOADED)) <= set(_known(now, OFFLOADED))),
    ),
    Rule(
        "attn-proj-needs-core-attn", "run", (_OFFLOADED,),
        "the input of attn_proj is the output of core_attn, which must be offloaded too",
        "add core_attn", _CONFIG,
        lambda now: _offloads(now, "attn_proj") and not _offloads(now, "core_attn"),
    ),
    Rule(
        "recomputed-experts-are-not-offloaded", "run", (_OFFLOADED, _MODULES, _GRANULARITY),
        "what is inside an MoE layer that is computed again cannot be offloaded",
        "drop moe from recompute_modules, or these modules", _CONFIG,
        lambda now: now["core"] != "0.16"
        and _recomputed(now, "moe")
        and _offloads(now, "moe_act", "expert_fc1", "fused_group_mlp"),
    ),
    Rule(
        "fused-group-mlp-needs-its-fuser", "run", (_OFFLOADED, "use_transformer_engine_op_fuser"),
        "fused_group_mlp is offloaded whole and by Transformer Engine's op fuser only",
        "drop fused_group_mlp", _CONFIG,
        lambda now: _offloads(now, "fused_group_mlp")
        and (not now["use_transformer_engine_op_fuser"] or _offloads(now, "expert_fc1", "moe_act")),
    ),
    # Router
    Rule(
        "router-groups-divide", "run", (_GROUP_TOPK, _GROUPS, "num_moe_experts"),
        "a choice among groups needs their number, which divides the experts and is no less than the choice",
        "give moe_router_num_groups and moe_router_group_topk of the model", _CONFIG,
        _groups,
    ),
    Rule(
        "one-name-for-groups", "run", (_GROUP_TOPK, "moe_router_topk_limited_devices"),
        "moe_router_topk_limited_devices is the older name of the other",
        "drop it", _CONFIG,
        lambda now: now[_GROUP_TOPK] and now["moe_router_topk_limited_devices"],
    ),
    Rule(
        "balancing-is-known", "run", ("moe_router_load_balancing_type", "core"),
        f"known are {', '.join(BALANCING)} (the last from 0.19) and lists of aux losses; others are silently ignored",
        "name one of these", "TopKRouter.routing",
        lambda now: not _balanced(now),
    ),
    Rule(
        "coefficients-need-types", "run", ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
        "a list of coefficients needs a list of balancing types",
        "give one coefficient", "TopKRouter.get_aux_loss_coeff, in the first step",
        lambda now: isinstance(now["moe_aux_loss_coeff"], list)
        and not isinstance(now["moe_router_load_balancing_type"], list),
    ),
    # Precision
    Rule(
        "fp8-param-needs-fp8", "run", ("fp8_param", "fp8"),
        "parameters in FP8 go with FP8 GEMMs only",
        "drop fp8_param, or give an FP8 precision", _CONFIG,
        lambda now: now["fp8_param"] and not now["fp8"],
    ),
    Rule(
        "fp4-param-needs-fp4", "run", ("fp4_param", "fp4"),
        "parameters in FP4 go with FP4 GEMMs only",
        "drop fp4_param", _CONFIG,
        lambda now: now["fp4_param"] and not now["fp4"],
    ),
    Rule(
        "one-quantisation", "run", ("fp8", "fp4"),
        "both at once cannot be computed",
        "drop one of them", _CONFIG,
        lambda now: now["fp8"] and now["fp4"],
    ),
    Rule(
        "one-half-precision", "run", ("fp16", "bf16"),
        "both at once cannot be computed",
        "drop fp16", _CONFIG,
        lambda now: now["fp16"] and now["bf16"],
    ),
    Rule(
        "bf16-ends-need-another-recipe", "run", ("first_last_layers_bf16", "fp8", "fp8_recipe"),
        "delayed scaling has no layers in bf16 at the ends",
        "drop first_last_layers_bf16, or use another recipe", _CONFIG,
        lambda now: now["fp8"] and now["first_last_layers_bf16"] and now["fp8_recipe"] == "delayed",
    ),
    Rule(
        "bf16-ends-fit-the-stage", "run", ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        "the layers in bf16 at an end are from 0 to those of a pipeline stage",
        "lower them", _CONFIG,
        lambda now: now["fp8"] and now["first_last_layers_bf16"] and _bf16_ends(now),
    ),
    Rule(
        "fp8-output-needs-mxfp8", "run", ("fp8_output_proj", "fp8", "fp8_recipe"),
        "the output projection is quantised under mxfp8 only",
        "drop fp8_output_proj", _CONFIG,
        lambda now: now["fp8_output_proj"] and (not now["fp8"] or now["fp8_recipe"] != "mxfp8"),
    ),
    # Overlap of expert parallel communication
    Rule(
        "ep-overlap-needs-vpp", "run", (_OVERLAP,),
        "with pp > 1 it overlaps virtual stages, and there are none",
        "give vpp=, or drop it", _CONFIG,
        lambda now: now[_OVERLAP] and now.layout.pp > 1 and now.layout.vpp == 1,
    ),
    Rule(
        "ep-overlap-needs-ep", "run", (_OVERLAP,),
        "with ep=1 there is nothing to overlap",
        "drop it", _CONFIG,
        lambda now: now[_OVERLAP] and now.layout.ep == 1,
    ),
    Rule(
        "ep-overlap-needs-exchange", "run", (_OVERLAP, _DISPATCHER),
        "allgather does not overlap",
        "use alltoall or flex", _CONFIG,
        lambda now: now[_OVERLAP] and now[_DISPATCHER] == "allgather",
    ),
    Rule(
        "ep-overlap-is-not-recomputed", "run", (_OVERLAP, _GRANULARITY, _METHOD, _LAYERS),
        "it does not go with full recomputation, its method or its number of layers",
        "use selective recomputation and drop the others", _CONFIG,
        lambda now: now[_OVERLAP]
        and (now[_GRANULARITY] == "full" or now[_METHOD] is not None or now[_LAYERS] is not None),
    ),
    Rule(
        "ep-overlap-keeps-the-layer", "run", (_OVERLAP, _MODULES),
        "an MoE layer that is computed again does not overlap",
        "drop moe from recompute_modules", _CONFIG,
        lambda now: now[_OVERLAP]
        and now["core"] != "0.16"
        and ("moe" in _listed(now, _MODULES) or bool(now["moe_layer_recompute"])),
    ),
    Rule(
        "ep-overlap-needs-half-precision", "run", (_OVERLAP, "bf16", "fp16"),
        "it works in bf16 and fp16 only",
        "drop it", _CONFIG,
        lambda now: now[_OVERLAP] and not now["bf16"] and not now["fp16"],
    ),
    Rule(
        "ep-overlap-is-one", "run", (_OVERLAP, _SHARED_OVERLAP),
        "shared experts overlap with the same communication",
        "drop moe_shared_expert_overlap", _CONFIG,
        lambda now: now[_OVERLAP] and now[_SHARED_OVERLAP],
    ),
    Rule(
        "ep-overlap-takes-one-mtp", "run", (_OVERLAP, _MTP, "core"),
        "it takes at most one MTP layer, in 0.16 with pp > 1 only",
        "ask for mtp_num_layers=None, or drop it", _CONFIG,
        lambda now: now[_OVERLAP] and (_too_many_mtp(now) or _flat(now)),
    ),
    Rule(
        "delayed-wgrad-needs-ep-overlap", "run", (_WGRAD, _OVERLAP),
        "weight gradients are delayed to overlap with expert parallel communication",
        f"ask for {_OVERLAP} too, or drop it", _CONFIG,
        lambda now: now[_WGRAD] and (not now[_OVERLAP] or bool(now["moe_use_legacy_grouped_gemm"])),
    ),
    Rule(
        "early-release-needs-ep-overlap", "run", (_RELEASE, _OVERLAP),
        "it releases memory of the overlap",
        f"ask for {_OVERLAP} too, or drop it", _CONFIG,
        lambda now: now[_RELEASE] and not now[_OVERLAP],
    ),
    # Pipeline
    Rule(
        "deferred-embedding-needs-pp", "run", (_DEFER, "gradient_accumulation_fusion", "wgrad_deferral_limit"),
        "it needs pp > 1, gradient accumulation fusion and a limit of at least 0",
        "drop it", _BASE,
        lambda now: now[_DEFER]
        and (
            now.layout.pp == 1 or not now["gradient_accumulation_fusion"] or (now["wgrad_deferral_limit"] or 0) < 0
        ),
    ),
    Rule(
        "flush-overlap-needs-unbatched", "run", (_FLUSH, "overlap_p2p_comm", "batch_p2p_comm"),
        "it needs overlapped and unbatched point-to-point communication",
        "drop it", _BASE,
        lambda now: now[_FLUSH] and (not now["overlap_p2p_comm"] or bool(now["batch_p2p_comm"])),
    ),
    # Attention
    Rule(
        "rope-fusion-of-mla-needs-yarn", "run", (_ROPE, "rope_type"),
        "rope is fused in multi-latent attention with YaRN only",
        "drop apply_rope_fusion", _MLA,
        lambda now: now[_ROPE] and now[_LATENT] and now["rope_type"] != "yarn",
    ),
    Rule(
        "yarn-takes-positive-numbers", "run", ("rope_type", *_YARN),
        "YaRN of multi-latent attention divides by them and takes their logarithms",
        "give positive numbers, and a rotary_base above 1", "YarnRotaryEmbedding",
        _not_positive,
    ),
    Rule(
        "mla-is-not-interleaved", "run", (_LATENT, "rotary_interleaved"),
        "multi-latent attention has its own order",
        "drop rotary_interleaved", _CONFIG,
        lambda now: now[_LATENT] and now["rotary_interleaved"],
    ),
    Rule(
        "cached-latents-need-plain-rope", "run", ("cache_mla_latents", _ROPE),
        "cached latents do not go with fused rope",
        "drop one of them", _MLA,
        lambda now: now[_LATENT] and now["cache_mla_latents"] and now[_ROPE],
    ),
    Rule(
        "fused-qkv-rope-has-no-gate", "run", ("fused_single_qkv_rope", "attention_output_gate"),
        "it does not know gated attention",
        "drop fused_single_qkv_rope", _CONFIG,
        lambda now: now["fused_single_qkv_rope"] and now["attention_output_gate"],
    ),
    Rule(
        "layer-scaling-has-fp32-softmax", "run", ("apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
        "scaled scores go through a softmax in fp32, whatever is asked for",
        "drop attention_softmax_in_fp32=False", "TransformerConfig sets it without a word",
        lambda now: now["apply_query_key_layer_scaling"] and now["attention_softmax_in_fp32"] is False,
    ),
    Rule(
        "attention-backend-is-known", "run", ("attention_backend",),
        f"it is none of {', '.join(BACKENDS)}",
        "name one of these", "AttnBackend",
        lambda now: now["attention_backend"] is not None and str(now["attention_backend"]) not in BACKENDS,
    ),
    Rule(
        "cp-kind-each", "run", ("cp_comm_type",),
        "it is one name, or a list with a name for every layer",
        "write one name", _CONFIG,
        _cp_kinds,
    ),
    Rule(
        "cp-kind-each-from-0.19", "run", ("cp_comm_type", "core"),
        "every layer would get the name of the next one, and the last layer none",
        "write one name, or use megatron-core 0.19", "TransformerLayer.__init__ of 0.16",
        lambda now: now["core"] == "0.16" and now.layout.cp > 1 and isinstance(now["cp_comm_type"], list),
    ),
    # Activation
    Rule(
        "one-activation", "run", (_ACTIVATION, "bias_activation_fusion"),
        "both replace the activation",
        f"drop {_ACTIVATION}", _CONFIG,
        lambda now: now[_ACTIVATION] and now["bias_activation_fusion"],
    ),
    Rule(
        "te-activation-has-no-clamp", "run", (_ACTIVATION, "glu_linear_offset"),
        "Transformer Engine has no activation of this kind",
        f"drop {_ACTIVATION}", _CONFIG,
        lambda now: now[_ACTIVATION] and bool(now["glu_linear_offset"]),
    ),
    Rule(
        "fp8-activations-are-swiglu", "run", ("activation_func_fp8_input_store", "glu_linear_offset"),
        "the input of an activation is kept in FP8 for SwiGLU only",
        "drop activation_func_fp8_input_store", _CONFIG,
        lambda now: now["activation_func_fp8_input_store"] and bool(now["glu_linear_offset"]),
    ),
)  # fmt: skip
