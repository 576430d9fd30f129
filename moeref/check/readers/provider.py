"""How bridges make a config from the model's own: what they set besides, in every family and in each.

Facts of mbridge at 10cb17f59dd0, Megatron-Bridge at 067f987df03b and mcore-bridge at f020e479a20b. What the model's own
config decides is left out. A framework's own settings and what a user asks for replace these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeref.check.readers.reading import Reading
from moeref.check.value import Value

Settings = Mapping[str, Any]

_FUSIONS = {"persist_layer_norm": True, "bias_activation_fusion": True, "bias_dropout_fusion": True}


@dataclass(frozen=True)
class Provider:
    """What a bridge sets in every family, and in each that it knows."""

    name: str
    always: Settings
    families: Mapping[str, Settings]


#: Of mbridge's `_build_base_config` and the `_build_config` of each model.
MBRIDGE = Provider(
    "mbridge",
    {
        "variable_seq_lengths": True,
        "masked_softmax_fusion": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        "moe_grouped_gemm": True,
    },
    {
        "qwen3_moe": {
            **_FUSIONS,
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.001,
            "moe_router_pre_softmax": False,
        },
        "deepseek_v3": {
            **_FUSIONS,
            "attention_backend": "fused",
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.001,
            "moe_shared_expert_overlap": True,
            "moe_router_pre_softmax": True,
            "moe_router_dtype": "fp32",
            "disable_bf16_reduced_precision_matmul": True,
        },
        "mixtral": {
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.001,
            "moe_router_pre_softmax": True,
        },
        "glm4_moe": {
            **_FUSIONS,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_overlap": True,
            "moe_router_pre_softmax": True,
            "moe_router_dtype": "fp32",
        },
        "qwen3_5_moe": {
            **_FUSIONS,
            "masked_softmax_fusion": False,
            "deallocate_pipeline_outputs": True,
            "cp_comm_type": "p2p",
            "moe_permute_fusion": True,
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.001,
            "moe_shared_expert_overlap": True,
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
        },
    },
)

_MLA_OF_BRIDGE = {
    **_FUSIONS,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_shared_expert_overlap": True,
    "moe_router_pre_softmax": True,
    "moe_router_dtype": "fp32",
    "apply_rope_fusion": False,
}
_BY_HYBRIDEP = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_flex_dispatcher_num_sms": 16,
    "moe_permute_fusion_into_hybridep": False,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_shared_expert_overlap": True,
    "moe_router_pre_softmax": True,
    "moe_router_dtype": "fp32",
}
#: Of GPTModelProvider and the `provider_bridge` of each model.
MEGATRON_BRIDGE = Provider(
    "Megatron-Bridge",
    {
        "masked_softmax_fusion": True,
        "gradient_accumulation_fusion": True,
        "cross_entropy_loss_fusion": True,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": True,
        "moe_grouped_gemm": True,
    },
    {
        "qwen3_moe": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001},
        "qwen3_next": {
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_aux_loss_coeff": 0.001,
            "moe_router_dtype": "fp32",
        },
        "deepseek_v3": {**_MLA_OF_BRIDGE, "moe_aux_loss_coeff": 0.0001, "cross_entropy_fusion_impl": "te"},
        "glm4_moe_lite": {**_MLA_OF_BRIDGE, "moe_aux_loss_coeff": 0.001, "moe_router_bias_update_rate": 0.0},
        "glm4_moe": {
            **_FUSIONS,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.001,
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_overlap": True,
            "moe_router_dtype": "fp32",
        },
        "gpt_oss": {
            "bias_activation_fusion": True,
            "bias_dropout_fusion": False,
            "moe_router_load_balancing_type": "none",
        },
        "qwen3_5_moe": {
            "bias_activation_fusion": True,
            "attention_softmax_in_fp32": True,
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_aux_loss_coeff": 0.001,
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
        },
        "glm_moe_dsa": {
            **_BY_HYBRIDEP,
            "cp_comm_type": "allgather",
            "mtp_num_layers": None,
            "dsa_indexer_loss_coeff": 0.001,
            "dsa_indexer_use_sparse_loss": True,
        },
        "kimi_k25": {
            **_FUSIONS,
            **_BY_HYBRIDEP,
            "moe_aux_loss_coeff": 0.001,
            "moe_router_bias_update_rate": 0.001,
            "apply_rope_fusion": False,
            "cross_entropy_fusion_impl": "te",
        },
        "minimax_m2": {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.001,
            "moe_router_pre_softmax": False,
        },
    },
)
#: Of mcore-bridge's ModelConfig and its parser of Hugging Face configs.
MCORE_BRIDGE = Provider(
    "mcore-bridge",
    {
        "variable_seq_lengths": True,
        "persist_layer_norm": True,
        "deallocate_pipeline_outputs": True,
        "moe_router_load_balancing_type": "aux_loss",
    },
    {
        **{family: {} for family in ("qwen3_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite", "mixtral")},
        **{family: {} for family in ("qwen3_5_moe", "glm_moe_dsa", "minimax_m2")},
        **{
            family: {"moe_router_load_balancing_type": "seq_aux_loss"}
            for family in ("deepseek_v3", "deepseek_v32", "kimi_k25")
        },
        "gpt_oss": {"bias_dropout_fusion": False},
    },
)
#: What verl sets in Megatron-Bridge's provider.
VERL_ON_MEGATRON_BRIDGE: Settings = {
    "batch_p2p_comm": False,
    "attention_backend": "flash",
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


def build(reading: Reading, provider: Provider, own: Settings, framework: str) -> Reading:
    """The reading with what a bridge sets, and with `own`, what the framework sets in it."""
    always = {name: Value(name, value, f"default of {provider.name}") for name, value in provider.always.items()}
    ours = {name: Value(name, value, f"default of {framework}") for name, value in own.items()}
    reading.by_family = {
        family: {
            **always,
            **{name: Value(name, value, f"default of {provider.name}") for name, value in settings.items()},
            **ours,
        }
        for family, settings in provider.families.items()
    }
    vpp = reading.layout.get("vpp")
    if provider is MBRIDGE:
        overlaps = bool(vpp and vpp.value > 1)
        for settings in reading.by_family.values():
            settings["overlap_p2p_comm"] = Value("overlap_p2p_comm", overlaps, f"derived: {provider.name} from VPP")
    tp, asked = reading.layout.get("tp"), reading.settings.get("sequence_parallel")
    if provider is MEGATRON_BRIDGE and tp and tp.value == 1 and asked and asked.value:
        off = Value("sequence_parallel", False, f"derived: {provider.name} turns it off at TP 1")
        reading.settings["sequence_parallel"] = off
    reading.options.setdefault("kernels", Value("kernels", "te", f"default of {provider.name}"))
    reading.options.setdefault("divisible_by", Value("divisible_by", 1, f"default of {provider.name}: no padding"))
    return reading
