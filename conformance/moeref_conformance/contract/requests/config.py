"""Settings that the facet `config` is asked for, by name of the request."""

from __future__ import annotations

from typing import Any

from moeref_conformance.contract.api import Request

#: Requests that a target has to honour, by name.
HONOURED: dict[str, Request] = {
    "nothing": Request(),
    "other values": Request(
        fields={"moe_router_load_balancing_type": "aux_loss"},
        overrides={"moe_z_loss_coeff": 0.25, "moe_router_dtype": "fp64"},
    ),
    # Each alone, as a target may refuse it: `judges.config` says where.
    "all-gather": Request(fields={"moe_token_dispatcher_type": "allgather"}),
    "grouped experts": Request(fields={"moe_grouped_gemm": True}),
    "replay": Request(fields={"moe_enable_routing_replay": True}),
    "another epsilon": Request(overrides={"layernorm_epsilon": 0.125}),
    "deterministic": Request(overrides={"deterministic_mode": True}),
    "overlap": Request(overrides={"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"}),
    # What a bridge may have on of itself, turned off; Megatron's default is off.
    "no overlap": Request(overrides={"moe_shared_expert_overlap": False}),
    "means of microbatches": Request(overrides={"calculate_per_token_loss": False}),
    "drop policy": Request(overrides={"moe_token_drop_policy": "position"}),
    "false": Request(fields={"moe_grouped_gemm": False, "moe_router_enable_expert_bias": False}),
    "false and zero, passed through": Request(
        overrides={
            "qk_layernorm": False,
            "gated_linear_unit": False,
            "moe_router_bias_update_rate": 0.0,
            "moe_aux_loss_coeff": 0.0,
        }
    ),
    "none": Request(
        overrides={
            "moe_router_topk_scaling_factor": None,
            "moe_shared_expert_intermediate_size": None,
            "moe_z_loss_coeff": None,
        }
    ),
    "a list": Request(
        fields={"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        overrides={"moe_aux_loss_coeff": [0.5, 0.25]},
    ),
    "recompute": Request(
        overrides={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    # A list of strings, and no number of layers.
    "recompute of modules": Request(
        overrides={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    ),
    # What recipes of training set besides, each another value than Megatron's default.
    "a recipe": Request(
        overrides={
            "calculate_per_token_loss": True,
            "moe_input_jitter_eps": 0.0625,
            "moe_per_layer_logging": True,
            "moe_router_bias_update_rate": 0.5,
            "moe_token_dispatcher_type": "alltoall",  # which the variable lengths need
            "mtp_loss_scaling_factor": 0.5,
            "variable_seq_lengths": True,
        }
    ),
    "softmax": Request(overrides={"attention_softmax_in_fp32": False}),
    "flex": Request(fields={"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}),
}
#: Requests in which both levels name a setting.
TWICE: dict[str, Request] = {
    "true, then false": Request(fields={"moe_grouped_gemm": True}, overrides={"moe_grouped_gemm": False}),
    "two dispatchers": Request(
        fields={"moe_token_dispatcher_type": "alltoall"}, overrides={"moe_token_dispatcher_type": "allgather"}
    ),
}
#: Names that no version of TransformerConfig has.
UNKNOWN: dict[str, Request] = {
    "unknown field": Request(fields={"moe_grouped_gemms": True}),
    "unknown override": Request(overrides={"moe_router_topkk": 2}),
    "unknown, and none": Request(overrides={"layernorm_epsilom": None}),
}
#: One of the two settings would silently have no effect.
SILENT: dict[str, Request] = {
    "replay under a fused router": Request(
        fields={"moe_enable_routing_replay": True}, overrides={"moe_router_fusion": True}
    ),
    "flex without a backend": Request(
        fields={"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": None}
    ),
}
REQUESTS = {**HONOURED, **TWICE, **UNKNOWN, **SILENT}
#: Asked of the reference model too.
OF_THE_REFERENCE = (
    "nothing",
    "other values",
    "grouped experts",
    "replay",
    "another epsilon",
    "false",
    "false and zero, passed through",
    "none",
    "a list",
    "recompute",
    "recompute of modules",
)


def same(a: Any, b: Any) -> bool:
    """Equality that distinguishes True from 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
