"""What moeref detects in a Hugging Face config is what transformers reads in it, and what its modules are made with."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moeref import families
from tests.unit.models import CONFIGS


def upstream(hf: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' config object and its modules, without storage, from the same dictionary."""
    return _upstream(json.dumps(hf))


@functools.cache
def _upstream(text: str) -> tuple[Any, Any]:
    config = AutoConfig.for_model(**json.loads(text))
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def first(holder: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that is there and not None."""
    return next((v for n in names if (v := getattr(holder, n, None)) is not None), default)


def gate(layer: Any) -> Any:
    return first(layer.mlp, "gate", "router")


def of_text(hf: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model, for transformers that lacks a class of the whole."""
    return {k: v for k, v in hf.items() if k != "text_config"} | hf.get("text_config", {})


#: Variants of the families' configs that say the same things in other words, or other things.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in CONFIGS),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2]}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    *(("glm4_moe", {"first_k_dense_replace": n}) for n in (0, 2, 4)),
    *(("deepseek_v3", {"first_k_dense_replace": n}) for n in (0, 1, 4)),
    ("glm4_moe_lite", {"first_k_dense_replace": 1}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    ("glm4_moe", {"n_shared_experts": 2}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
    ("glm4_moe", {"rope_parameters": None, "rope_theta": 500_000.0, "partial_rotary_factor": 0.25}),
    # GLM-4.7-Flash: the rope's parameters lie inside rope_scaling, and there is no mscale.
    ("glm4_moe_lite", {"rope_parameters": None, "rope_scaling": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    ("deepseek_v3", {"num_nextn_predict_layers": 1}),
]


@pytest.fixture(params=VARIANTS, ids=lambda v: f"{v[0]}-{v[1]}")
def both(request: pytest.FixtureRequest) -> tuple[families.Model, Any, Any]:
    family, changes = request.param
    hf = {k: v for k, v in {**CONFIGS[family], **changes}.items() if v is not None}
    return families.read(hf), *upstream(of_text(hf))


def test_sizes(both: tuple[families.Model, Any, Any]) -> None:
    ours, config, _ = both
    text = config.get_text_config()
    assert (ours.num_layers, ours.hidden) == (text.num_hidden_layers, text.hidden_size)
    assert (ours.heads, ours.vocab) == (text.num_attention_heads, text.vocab_size)
    assert (ours.tied, ours.norm_eps) == (bool(text.tie_word_embeddings), text.rms_norm_eps)
    assert ours.max_positions == text.max_position_embeddings
    assert ours.mtp_layers == first(text, "num_nextn_predict_layers", default=0)
    if ours.mla is None:
        assert (ours.kv_groups, ours.head_dim) == (text.num_key_value_heads, text.head_dim)
    else:
        latent = (
            text.q_lora_rank or 0,
            text.kv_lora_rank,
            text.qk_nope_head_dim,
            text.qk_rope_head_dim,
            text.v_head_dim,
        )
        assert (ours.mla.q_rank, ours.mla.kv_rank, ours.mla.nope, ours.mla.rope, ours.mla.v) == latent


def test_experts(both: tuple[families.Model, Any, Any]) -> None:
    ours, config, theirs = both
    layers = theirs.model.layers
    assert ours.moe_layers == tuple(hasattr(layer.mlp, "experts") for layer in layers)
    for layer, moe in zip(layers, ours.moe_layers, strict=True):
        if not moe:
            assert layer.mlp.gate_proj.out_features == ours.ffn
            continue
        assert gate(layer).weight.shape == (ours.experts, ours.hidden)
        assert layer.mlp.experts.down_proj.shape[0] == ours.experts
        assert ours.moe_ffn in layer.mlp.experts.down_proj.shape[1:]
        has_bias = hasattr(gate(layer), "e_score_correction_bias") or hasattr(layer.mlp, "e_score_correction_bias")
        assert ours.expert_bias == has_bias
        shared = first(layer.mlp, "shared_experts", "shared_expert")
        assert ours.shared_ffn == (shared.gate_proj.out_features if shared is not None else 0)
    assert ours.top_k == config.num_experts_per_tok
    assert ours.routed_scaling_factor == first(config, "routed_scaling_factor", default=1.0)
    assert (ours.n_group, ours.topk_group) == (
        first(config, "n_group", default=1),
        first(config, "topk_group", default=1),
    )


def test_attention(both: tuple[families.Model, Any, Any]) -> None:
    ours, config, theirs = both
    attention = next(layer.self_attn for layer in theirs.model.layers if hasattr(layer, "self_attn"))
    if ours.mla is None:
        assert ours.qkv_bias == (attention.q_proj.bias is not None)
        assert ours.qk_norm == hasattr(attention, "q_norm")
    rope = config.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rotary_percent == rope.get("partial_rotary_factor", 1.0)
    yarn = ours.mla.yarn if ours.mla else getattr(ours, "yarn", None)
    assert (rope["rope_type"] == "yarn") == (yarn is not None)
    if yarn is not None:
        assert yarn.factor == rope["factor"]
        assert yarn.original_positions == rope["original_max_position_embeddings"]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_score_function_is_the_one_that_the_router_computes(family: str) -> None:
    """Scores of a real gate, recomputed in the function that moeref found."""
    ours = families.read(CONFIGS[family])
    torch.manual_seed(7)
    # transformers writes into the dictionaries that it is given.
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(of_text(CONFIGS[family])))).eval()
    mlp = next(layer.mlp for layer in theirs.model.layers if hasattr(layer.mlp, "experts"))
    router = first(mlp, "gate", "router")
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    seen: dict[str, torch.Tensor] = {}
    mlp.experts.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(enumerate([*args, *kwargs.values()])), with_kwargs=True
    )
    hidden_BSH = torch.randn(1, 5, ours.hidden)
    with torch.no_grad():
        mlp(hidden_BSH)
        logits_TE = torch.nn.functional.linear(hidden_BSH[0], router.weight, getattr(router, "bias", None))
    chosen_TK, weights_TK = (t for t in (seen[1], seen[2]))
    if chosen_TK.is_floating_point():
        chosen_TK, weights_TK = weights_TK, chosen_TK
    scores_TE = logits_TE.softmax(-1) if ours.score_function == "softmax" else logits_TE.sigmoid()
    wanted_TK = scores_TE.gather(1, chosen_TK)
    if ours.norm_topk_prob:
        wanted_TK = wanted_TK / wanted_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(weights_TK, wanted_TK * ours.routed_scaling_factor)
