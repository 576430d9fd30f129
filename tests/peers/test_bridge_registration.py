"""GLM-4.7-Flash in megatron-bridge: added only where it is lacking, and the HF config left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

pytest.importorskip("megatron.bridge", reason="megatron-bridge is installed in the peers' environments only")

from megatron.bridge import AutoBridge

from moeref import families
from moeref.config import MoEConfig, resolve, transformer_settings
from moeref.config import apply as apply_record
from moeref.layout import Layout
from moeref.megatron.bridge_registration import ARCHITECTURE, register_glm4_moe_lite

THERE_BEFORE = ARCHITECTURE in AutoBridge.list_supported_models()
REGISTERED = register_glm4_moe_lite()
#: As published, its rope's parameters inside rope_scaling.
GLM: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "dtype": "bfloat16",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
#: What the provider of such a model has to hold, written down from the published config.
WANTED: dict[str, Any] = {
    "num_layers": 47,
    "hidden_size": 2048,
    "ffn_hidden_size": 10240,
    "num_moe_experts": 64,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 1536,
    "moe_shared_expert_intermediate_size": 1536,
    "moe_layer_freq": [0] + [1] * 46,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.8,
    "layernorm_epsilon": 1e-5,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_head_dim": 192,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 256,
    "rotary_base": 1_000_000.0,
    "rotary_scaling_factor": 1.0,
}


class Pretrained:
    """As much of a pretrained model as a bridge asks for when it makes a provider."""

    def __init__(self, **changes: Any) -> None:
        self.config = _config({**GLM, **changes})


def _config(values: dict[str, Any]) -> Any:
    """The family's own config class where transformers has it, otherwise the plain one."""
    kind = getattr(transformers, "Glm4MoeLiteConfig", transformers.PretrainedConfig)
    return kind(**{k: copy.deepcopy(v) for k, v in values.items() if k != "model_type"})


def bridge() -> Any:
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    return get_model_bridge(ARCHITECTURE)


def test_it_is_added_only_where_it_is_lacking() -> None:
    assert ("already registered" if THERE_BEFORE else "registered") == REGISTERED
    assert register_glm4_moe_lite() == "already registered"
    assert type(bridge()).__module__.startswith("megatron" if THERE_BEFORE else "moeref")


def test_the_provider_holds_the_published_model() -> None:
    provider = bridge().provider_bridge(Pretrained())
    assert {name: getattr(provider, name) for name in WANTED} == WANTED


def test_the_hf_config_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Pretrained()
    before = copy.deepcopy(vars(given.config))
    bridge().provider_bridge(given)
    assert vars(given.config) == before
    if THERE_BEFORE:
        return
    from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge

    def broken(self: Any, hf_pretrained: Any) -> Any:
        hf_pretrained.config.rope_theta = None
        raise RuntimeError("broken")

    monkeypatch.setattr(DeepSeekV3Bridge, "provider_bridge", broken)
    with pytest.raises(RuntimeError, match="broken"):
        bridge().provider_bridge(given)
    assert vars(given.config) == before


def test_settings_are_applied_to_the_provider_and_read_back() -> None:
    provider = bridge().provider_bridge(Pretrained())
    model = families.read(GLM)
    asked = MoEConfig(
        moe_grouped_gemm=False,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        transformer_config_kwargs={
            "moe_shared_expert_overlap": False,
            "moe_router_dtype": None,
            "mtp_num_layers": None,
            "moe_permute_fusion": False,  # a kernel of Transformer Engine
        },
    )
    record = resolve(model, Layout(tp=2, ep=2), asked, provider=provider)
    done = apply_record(record, provider)
    for name, value in {**asked.fields, **asked.transformer_config_kwargs}.items():
        assert getattr(provider, name) == value, name
    assert (provider.tensor_model_parallel_size, provider.sequence_parallel) == (2, True)
    assert {done.origin(name) for name in asked.fields} == {"field"}
    assert {done.origin(name) for name in asked.transformer_config_kwargs} == {"override"}
    assert done.origin("moe_aux_loss_coeff") == "provider default"
    assert transformer_settings(model, Layout()).keys() <= done.trails.keys()
