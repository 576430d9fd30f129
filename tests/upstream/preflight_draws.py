"""Random runs for `preflight_cases`: small models, layouts, options of `check`, and settings that meet one another."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

FAMILIES = (
    *("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "glm4_moe_lite", "qwen3_next", "glm_moe_dsa"),
    "minimax_m2",
)
MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
    "x",
)
OFFLOADED = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "other")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn", "aux")
TRUE = st.booleans()


def _lists(names: Iterable[str]) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(list(names)), max_size=3, unique=True)


#: Settings that meet one another, drawn together: each name with its values.
BUNDLES: tuple[dict[str, st.SearchStrategy[Any]], ...] = (
    {
        "recompute_granularity": st.sampled_from(["full", "selective", None]),
        "recompute_method": st.sampled_from(["uniform", "block", None]),
        "recompute_num_layers": st.sampled_from([1, 2, None]),
        "recompute_modules": st.none() | _lists(MODULES),
        "moe_layer_recompute": TRUE,
        "distribute_saved_activations": TRUE,
        "moe_grouped_gemm": TRUE,
        "moe_shared_expert_overlap": TRUE,
    },
    {
        "overlap_moe_expert_parallel_comm": st.just(True),
        "delay_wgrad_compute": TRUE,
        "ep_overlap_early_attn_memory_release": TRUE,
        "moe_shared_expert_overlap": TRUE,
        "recompute_granularity": st.sampled_from(["full", "selective", None]),
        "recompute_method": st.sampled_from(["uniform", None]),
        "recompute_modules": _lists(MODULES),
        "mtp_num_layers": st.sampled_from([None, 0, 1]),
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather"]),
    },
    {
        "fine_grained_activation_offloading": st.just(True),
        "offload_modules": _lists(OFFLOADED),
        "recompute_granularity": st.sampled_from(["selective", None]),
        "recompute_modules": _lists(MODULES),
    },
    {
        "moe_router_num_groups": st.sampled_from([1, 2, 3, 4, 5, None]),
        "moe_router_group_topk": st.sampled_from([0, 1, 2, 5, None]),
        "moe_router_topk": st.sampled_from([1, 2, 4]),
        "moe_router_score_function": st.sampled_from(["softmax", "sigmoid"]),
        "moe_router_enable_expert_bias": TRUE,
        "moe_router_pre_softmax": TRUE,
        "moe_router_load_balancing_type": st.sampled_from(LOSSES) | _lists(LOSSES).filter(bool),
        "moe_aux_loss_coeff": st.sampled_from([0.0, 0.1, [0.1], [0.1, 0.2]]),
        "moe_router_dtype": st.sampled_from(["fp32", "fp64", None]),
        "moe_router_fusion": TRUE,
    },
    {
        "fp8": st.sampled_from(["e4m3", "hybrid", None]),
        "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "fp8_param": TRUE,
        "fp4": st.sampled_from(["e2m1", None]),
        "fp4_param": TRUE,
        "first_last_layers_bf16": TRUE,
        "num_layers_at_start_in_bf16": st.integers(-1, 5),
        "num_layers_at_end_in_bf16": st.integers(-1, 5),
        "fp8_output_proj": TRUE,
        "moe_router_padding_for_quantization": TRUE,
        "recompute_modules": _lists(MODULES),
        "recompute_granularity": st.sampled_from(["selective", None]),
    },
    {
        "moe_expert_capacity_factor": st.sampled_from([-1.0, 0.5, 1.0, None]),
        "moe_pad_expert_input_to_capacity": TRUE,
        "moe_token_drop_policy": st.sampled_from(["probs", "position"]),
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather", "flex"]),
        "moe_flex_dispatcher_backend": st.sampled_from(["deepep", "hybridep"]),
        "moe_enable_deepep": TRUE,
        "variable_seq_lengths": TRUE,
        "moe_permute_fusion": TRUE,
        "moe_router_load_balancing_type": st.sampled_from(LOSSES),
    },
    {
        "apply_rope_fusion": TRUE,
        "rotary_interleaved": TRUE,
        "cache_mla_latents": TRUE,
        "fused_single_qkv_rope": TRUE,
        "attention_backend": st.sampled_from(["flash", "fused", "auto", "flesh"]),
        "cp_comm_type": st.sampled_from(["p2p", "a2a", ["p2p"], ["p2p"] * 4]),
        "bias_activation_fusion": TRUE,
        "use_te_activation_func": TRUE,
        "activation_func_fp8_input_store": TRUE,
    },
    {
        "defer_embedding_wgrad_compute": TRUE,
        "gradient_accumulation_fusion": TRUE,
        "wgrad_deferral_limit": st.integers(-1, 1),
        "overlap_p2p_comm": TRUE,
        "batch_p2p_comm": TRUE,
        "overlap_p2p_comm_warmup_flush": TRUE,
        "fp32_residual_connection": TRUE,
        "fp16": TRUE,
    },
    {
        "moe_token_dispatcher_type": st.just("flex"),
        "moe_flex_dispatcher_backend": st.sampled_from(["deepep", "hybridep"]),
        "moe_hybridep_num_sms": st.sampled_from([0, 16, 32]),
        "moe_deepep_num_sms": st.sampled_from([0, 20]),
        "moe_enable_deepep": TRUE,
        "moe_router_dtype": st.sampled_from(["fp32", "fp64", None]),
        "moe_router_padding_for_quantization": TRUE,
        "moe_permute_fusion": TRUE,
        "moe_shared_expert_overlap": TRUE,
        "moe_expert_capacity_factor": st.sampled_from([1.0, None]),
        "moe_pad_expert_input_to_capacity": TRUE,
        "variable_seq_lengths": TRUE,
    },
    {
        "cp_comm_type": st.sampled_from(["p2p", "a2a", "all_gather", "a2a+p2p", ["a2a+p2p"] * 4, ["a2a"] * 3]),
        "hierarchical_context_parallel_sizes": st.sampled_from([[2], [1, 2], [2, 2], None]),
        "attention_backend": st.sampled_from(["flash", "fused", "unfused", "local", "auto"]),
        "sequence_parallel": TRUE,
        "calculate_per_token_loss": TRUE,
        "window_size": st.sampled_from([[16, 0], None]),
        "softmax_type": st.sampled_from(["vanilla", "learnable", "off-by-one"]),
        "qk_clip": TRUE,
        "attention_softmax_in_fp32": TRUE,
        "apply_query_key_layer_scaling": TRUE,
        "masked_softmax_fusion": TRUE,
    },
    {
        "microbatch_group_size_per_vp_stage": st.integers(0, 4),
        "overlap_p2p_comm": TRUE,
        "batch_p2p_comm": TRUE,
        "variable_seq_lengths": TRUE,
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather"]),
        "deallocate_pipeline_outputs": TRUE,
        "mtp_num_layers": st.sampled_from([None, 0, 1, 2]),
        "tp_comm_overlap": TRUE,
        "sequence_parallel": TRUE,
        "cpu_offloading": TRUE,
        "cpu_offloading_num_layers": st.integers(0, 4),
        "use_cpu_initialization": TRUE,
    },
    {
        "moe_shared_expert_gate": TRUE,
        "moe_router_topk": st.integers(1, 5),
        "moe_router_topk_scaling_factor": st.sampled_from([0.0, 2.5, None]),
        "moe_router_bias_update_rate": st.sampled_from([0.0, 1e-3]),
        "moe_router_enable_expert_bias": TRUE,
        "moe_router_score_function": st.sampled_from(["softmax", "sigmoid"]),
        "moe_router_force_load_balancing": TRUE,
        "moe_z_loss_coeff": st.sampled_from([1e-3, None]),
        "moe_input_jitter_eps": st.sampled_from([1e-2, None]),
        "moe_apply_probs_on_input": TRUE,
        "moe_use_legacy_grouped_gemm": TRUE,
        "moe_ffn_hidden_size": st.sampled_from([56, 64]),
        "add_bias_linear": TRUE,
        "qk_layernorm": TRUE,
    },
)
#: Layout strings of four layers, right and wrong, by their number of stages.
PATTERNS = {
    1: ("EttttL", "EtttL"),
    2: ("Et|tttL", "Ett|ttmL", "Ettt|t", "E|ttttL"),
    4: ("Et|t|t|tL", "E|tt|tt|L", "Et|t|t|tmL", "Et|tt|t|L", "Et|t|t|t"),
    8: ("E|t|t|t|t||m|L", "Et|t|t|t|||m|L", "E|t|t|t|t|||L"),
}


@dataclass(frozen=True)
class Run:
    """One run: a small model of a family, a layout, options of `check`, and settings."""

    family: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@functools.cache
def _typed(core: str) -> st.SearchStrategy[tuple[str, Any]]:
    """Any field with a type that is known, and a value of it."""
    from moeref.config.core import known_fields

    values = {"bool": TRUE, "int": st.integers(0, 4), "float": st.sampled_from([0.0, 0.5, 1.0])}
    pairs = [
        st.tuples(st.just(name), st.sampled_from(known["choices"]) if "choices" in known else values[known["type"]])
        for name, known in known_fields(core, mla=True).items()
        if {"type", "choices"} & known.keys()
    ]
    return st.one_of(pairs)


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """The text of a layout: sizes, and at times ends of another size, ends that count, or a string."""
    sizes = {
        axis: draw(st.sampled_from(of)) for axis, of in {"tp": (1, 2, 4), "pp": (1, 2, 4), "ep": (1, 2, 4, 8)}.items()
    }
    sizes["cp"] = draw(st.sampled_from([1, 1, 2, 4]))
    sizes["etp"] = draw(st.sampled_from([1, 1, 2, sizes["tp"]]))
    if sizes["pp"] > 1:
        sizes["vpp"] = draw(st.sampled_from([1, 1, 1, 2, 4]))
    kind = draw(st.sampled_from(["even", "even", "even", "ends", "counted", "string"]))
    if kind == "ends":
        sizes |= {end: draw(st.integers(0, 3)) for end in draw(_lists(["first", "last"]))}
    if kind == "counted":
        sizes |= dict.fromkeys(draw(_lists(["embedding", "loss"])), 1)
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    stages = sizes["pp"] * sizes.get("vpp", 1)
    if kind == "string" and stages in PATTERNS:
        text += f",pipeline_layout={draw(st.sampled_from(PATTERNS[stages]))}"
    return text


@st.composite
def runs(draw: st.DrawFn, core: str) -> Run:
    """Runs whose settings are some of a bundle and, at times, any others."""
    from moeref.config.precision import PRECISIONS
    from moeref.dispatcher import AUTO, Choice

    layout = draw(layouts())
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "kernels": st.just("te"),
                "experts": st.sampled_from(["sequential", "grouped"]),
                "replay": st.sampled_from(["R2", "R3"]),
                "precision": st.sampled_from(list(PRECISIONS)),
                "dispatcher": st.sampled_from([AUTO, *map(str, Choice)]),
            },
        )
    )
    bundle = draw(st.sampled_from(BUNDLES))
    names = draw(st.lists(st.sampled_from(sorted(bundle)), max_size=5, unique=True))
    asked = {name: draw(bundle[name]) for name in names}
    asked |= dict(draw(st.lists(_typed(core), max_size=1)))
    return Run(draw(st.sampled_from(FAMILIES)), layout, options, asked)
