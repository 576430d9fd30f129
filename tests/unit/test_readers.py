"""Readers of configs, key by key: what the small configs of `models` mean, what no key means, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeref import families
from moeref.families import FamilyError, Model, SpecNames
from moeref.families.model import MLA, GatedDeltaNet, Indexer, Window, Yarn
from tests.unit.models import CONFIGS, model

pytestmark = pytest.mark.cpu

DECODER: dict[str, Any] = {
    "num_layers": 4,
    "hidden": 24,
    "heads": 16,
    "vocab": 131,
    "ffn": 80,
    "moe_ffn": 56,
    "experts": 16,
    "top_k": 3,
    "moe_layers": (True,) * 4,
    "tied": False,
    "norm_topk_prob": True,
    "norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_positions": 64,
    "param_dtype": "float32",
}
GROUPED: dict[str, Any] = {"kv_groups": 8, "head_dim": 6}
SIGMOID: dict[str, Any] = {
    "score_function": "sigmoid",
    "fp32_router": True,
    "expert_bias": True,
    "qk_norm": True,
    "shared_ffn": 56,
}
YARN = Yarn(factor=4.0, original_positions=16, beta_fast=32.0, beta_slow=1.0, mscale=0.8, mscale_all_dim=1.0)
SIZES_OF_LATENTS: dict[str, int] = {"q_rank": 26, "kv_rank": 20, "nope": 10, "rope": 8, "v": 6}
SIZES_OF_INDEXERS: dict[str, int] = {"heads": 3, "head_dim": 12, "top_k": 7}
ONE_DENSE = (False, True, True, True)
DELTA: dict[str, Any] = {"key_heads": 8, "value_heads": 16, "key_dim": 5, "value_dim": 10, "kernel": 4}
EXPECTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**GROUPED, "score_function": "softmax", "qk_norm": True},
    "mixtral": {**GROUPED, "score_function": "softmax", "moe_ffn": 80},
    "minimax_m2": {
        **GROUPED,
        **{key: value for key, value in SIGMOID.items() if key != "shared_ffn"},
        "moe_ffn": 80,
        "one_qk_norm": True,
        "rotary_percent": 4 / 6,
    },
    "glm4_moe": {
        **GROUPED,
        **SIGMOID,
        "moe_layers": ONE_DENSE,
        "qkv_bias": True,
        "routed_scaling_factor": 1.7,
        "rotary_percent": 0.5,
    },
    "deepseek_v3": {
        **SIGMOID,
        "kv_groups": 16,
        "head_dim": 6,
        "top_k": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_layers": (False, False, True, True),
        "routed_scaling_factor": 2.5,
        "mla": MLA(**SIZES_OF_LATENTS, yarn=YARN),
    },
    "glm4_moe_lite": {
        **SIGMOID,
        "kv_groups": 16,
        "head_dim": 6,
        "moe_layers": ONE_DENSE,
        "routed_scaling_factor": 1.8,
        "mla": MLA(**SIZES_OF_LATENTS, yarn=None),
    },
    "deepseek_v32": {
        **SIGMOID,
        "kv_groups": 16,
        "head_dim": 6,
        "top_k": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_layers": (False, False, True, True),
        "routed_scaling_factor": 2.5,
        "mla": MLA(**SIZES_OF_LATENTS, yarn=YARN),
        "indexer": Indexer(layers=(True,) * 4, **SIZES_OF_INDEXERS, interleaved=False),
    },
    "kimi_k25": {
        **SIGMOID,
        "kv_groups": 16,
        "head_dim": 6,
        "top_k": 4,
        "norm_eps": 1e-5,
        "moe_layers": ONE_DENSE,
        "routed_scaling_factor": 2.7,
        "mla": MLA(**SIZES_OF_LATENTS, yarn=YARN),
        "ignored": ("vision_tower.", "mm_projector."),
    },
    "glm_moe_dsa": {
        **SIGMOID,
        "kv_groups": 16,
        "head_dim": 6,
        "moe_layers": ONE_DENSE,
        "routed_scaling_factor": 1.9,
        "mla": MLA(**SIZES_OF_LATENTS, yarn=None),
        "indexer": Indexer(layers=(True,) * 4, **SIZES_OF_INDEXERS, interleaved=True),
    },
    "gpt_oss": {
        **GROUPED,
        "score_function": "softmax",
        "experts": 32,
        "moe_ffn": 80,
        "qkv_bias": True,
        "linear_bias": True,
        "sinks": True,
        "window": Window(5, (True, False, True, False)),
        "clamp": 7.0,
        "yarn": replace(YARN, mscale=1.0, mscale_all_dim=0.0, truncate=False),
    },
    "qwen3_next": {
        **GROUPED,
        "score_function": "softmax",
        "experts": 64,
        "shared_ffn": 72,
        "shared_gate": True,
        "moe_layers": (True, False, True, True),
        "qk_norm": True,
        "output_gate": True,
        "zero_centered": True,
        "mtp_apart": True,
        "rotary_percent": 0.25,
        "gated_delta_net": GatedDeltaNet(layers=(True, True, False, True), **DELTA),
        "ignored": ("mtp.",),
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_config_means(name: str) -> None:
    assert model(name) == Model(family=name, **{**DECODER, **EXPECTED[name]})


@pytest.mark.parametrize(
    ("name", "left_out", "field", "value"),
    [
        # transformers' defaults
        ("qwen3_moe", "norm_topk_prob", "norm_topk_prob", False),
        ("qwen3_moe", "head_dim", "head_dim", 1),
        ("glm4_moe", "first_k_dense_replace", "moe_layers", ONE_DENSE),
        ("glm4_moe", "attention_bias", "qkv_bias", False),
        ("glm4_moe", "use_qk_norm", "qk_norm", False),
        ("glm4_moe", "n_shared_experts", "shared_ffn", 0),
        ("glm4_moe", "routed_scaling_factor", "routed_scaling_factor", 1.0),
        ("deepseek_v3", "first_k_dense_replace", "moe_layers", (False, False, False, True)),
        ("deepseek_v3", "dtype", "param_dtype", "bfloat16"),
        ("qwen3_next", "mlp_only_layers", "moe_layers", (True,) * 4),
        (
            "qwen3_next",
            "full_attention_interval",
            "gated_delta_net",
            GatedDeltaNet(layers=(True, True, True, False), **DELTA),
        ),
        # without a latent, queries come from the hidden state
        ("deepseek_v3", "q_lora_rank", "mla", MLA(**{**SIZES_OF_LATENTS, "q_rank": 0}, yarn=YARN)),
    ],
)
def test_what_a_left_out_key_means(name: str, left_out: str, field: str, value: object) -> None:
    config = {k: v for k, v in CONFIGS[name].items() if k != left_out}
    if left_out == "head_dim":
        config["num_attention_heads"] = 24
    read = getattr(families.read(config), field)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("name", EXPECTED)
def test_keys_that_every_family_spells_alike(name: str) -> None:
    assert model(name, tie_word_embeddings=True).tied
    assert families.read(CONFIGS[name], "bfloat16").param_dtype == "bfloat16"
    plain = {k: v for k, v in CONFIGS[name].items() if k != "dtype"}
    assert families.read({**plain, "torch_dtype": "torch.float16"}).param_dtype == "float16"


def test_experts_are_counted_under_either_name() -> None:
    plain = {k: v for k, v in CONFIGS["qwen3_moe"].items() if k != "num_experts"}
    assert families.read({**plain, "num_local_experts": 16}) == model("qwen3_moe")
    plain = {k: v for k, v in CONFIGS["glm4_moe"].items() if k != "n_routed_experts"}
    assert families.read({**plain, "num_local_experts": 16}) == model("glm4_moe")
    plain = {k: v for k, v in CONFIGS["qwen3_next"].items() if k != "num_experts"}
    assert families.read({**plain, "num_local_experts": 64}) == model("qwen3_next")


def test_a_dense_prefix_needs_its_layers_listed_in_glm4_moe_lite() -> None:
    with pytest.raises(FamilyError, match=r"^glm4_moe_lite: first_k_dense_replace=2 is read differently"):
        model("glm4_moe_lite", first_k_dense_replace=2)
    listed = model("glm4_moe_lite", first_k_dense_replace=2, mlp_layer_types=["dense", "dense", "sparse", "sparse"])
    assert listed.moe_layers == (False, False, True, True)
    with pytest.raises(FamilyError, match=r"^glm4_moe_lite: mlp_layer_types must say dense or sparse"):
        model("glm4_moe_lite", mlp_layer_types=["dense", "sparse"])


#: family -> switches with the value that its table describes and one that it does not.
MLA_SWITCHES: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "gelu"),
    "attention_bias": (False, True),
    "rope_interleave": (True, False),
    "norm_topk_prob": (True, False),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc", "greedy"),
    "moe_layer_freq": (1, 2),
    "num_key_value_heads": (16, 8),
}
SWITCHES: dict[str, dict[str, tuple[Any, Any]]] = {
    "qwen3_moe": {
        "hidden_act": ("silu", "gelu"),
        "attention_bias": (False, True),
        "use_sliding_window": (False, True),
    },
    "mixtral": {
        "hidden_act": ("silu", "gelu"),
        "attention_bias": (False, True),
        "sliding_window": (None, 4096),
        "router_jitter_noise": (0.0, 0.1),
    },
    "minimax_m2": {
        "hidden_act": ("silu", "gelu"),
        "attention_bias": (False, True),
        "sliding_window": (None, 4096),
        "router_jitter_noise": (0.0, 0.1),
        "use_qk_norm": (True, False),
        "qk_norm_type": ("per_layer", "per_head"),
        "scoring_func": ("sigmoid", "softmax"),
        "use_routing_bias": (True, False),
        "shared_intermediate_size": (0, 64),
    },
    "glm4_moe": {"hidden_act": ("silu", "gelu"), "norm_topk_prob": (True, False)},
    "deepseek_v3": MLA_SWITCHES,
    "glm4_moe_lite": MLA_SWITCHES,
    "deepseek_v32": MLA_SWITCHES,
    "glm_moe_dsa": MLA_SWITCHES,
    "kimi_k25": {**MLA_SWITCHES, "num_nextn_predict_layers": (0, 1)},
    "gpt_oss": {"hidden_act": ("silu", "gelu"), "attention_bias": (True, False), "swiglu_limit": (7.0, 5.0)},
    "qwen3_next": {
        "hidden_act": ("silu", "gelu"),
        "attention_bias": (False, True),
        "use_sliding_window": (False, True),
    },
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in SWITCHES.items() for key in keys])
def test_switches(name: str, key: str) -> None:
    right, wrong = SWITCHES[name][key]
    assert model(name, **{key: right}) == model(name)
    with pytest.raises(FamilyError, match=rf"^{name}: {key}={wrong!r} is not mapped \(only {right!r} is\)"):
        model(name, **{key: wrong})


OPTIONAL = {"model_type", "dtype", "head_dim", "rope_parameters", "norm_topk_prob", "first_k_dense_replace", "n_group"}
OPTIONAL |= {"attention_bias", "use_qk_norm", "n_shared_experts", "routed_scaling_factor", "q_lora_rank", "topk_group"}
OPTIONAL |= {"mlp_only_layers", "full_attention_interval", "num_experts", "indexer_rope_interleave", "rotary_dim"}
# With latent attention a config may leave out its KV heads.
HEADS = {"num_key_value_heads"}
REQUIRED = [
    (name, key)
    for name in EXPECTED
    for key in CONFIGS[name]
    if key not in OPTIONAL and not (key in HEADS and "q_lora_rank" in CONFIGS[name])
]
REQUIRED.append(("gpt_oss", "head_dim"))


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_a_required_key_is_named(name: str, key: str) -> None:
    config = {k: v for k, v in CONFIGS[name].items() if k != key}
    with pytest.raises(FamilyError, match=rf"^{name}: config.json has no {key}\b"):
        families.read(config)


@pytest.mark.parametrize(
    ("given", "layers", "period"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, (True, False, True, False), (2, 1)),
        ({"index_topk_pattern": "FFSS"}, (True, True, False, False), (3, 2)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (True, True, True, False), (2, 3)),
        ({"index_topk_freq": 2}, (True, True, False, True), (2, 2)),
        ({"index_topk_freq": None, "indexer_types": None}, (True,) * 4, (1, 1)),
    ],
)
def test_layers_with_an_indexer_have_a_period(
    given: dict[str, Any], layers: tuple[bool, ...], period: tuple[int, int]
) -> None:
    indexer = model("glm_moe_dsa", **given).indexer
    assert indexer is not None
    assert (indexer.layers, indexer.shared) == (layers, period)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"indexer_types": ["full", "shared"]}, "full or shared for each of 4 layers, the first full, not"),
        ({"index_topk_pattern": "SFFF"}, "F or S for each of 4 layers, the first F, not SFFF"),
        ({"q_lora_rank": None}, "an indexer reads latent queries, and q_lora_rank=None"),
        ({"index_topk_pattern": "FSFF"}, "indexers of layers without a period are not mapped"),
    ],
)
def test_other_layers_with_an_indexer_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(FamilyError, match=f"^glm_moe_dsa: {says}"):
        model("glm_moe_dsa", **given)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_rope_without_theta_is_refused_by_name(name: str) -> None:
    with pytest.raises(FamilyError, match=rf"^{name}: .*rope_theta"):
        model(name, rope_parameters={"rope_type": "default"})
    with pytest.raises(FamilyError, match=rf"^{name}: rope type .*'linear'.* is not mapped"):
        model(name, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})


def test_older_and_newer_places_of_rope_settings() -> None:
    newer = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    read = model("glm4_moe", rope_parameters=newer)
    assert (read.rope_theta, read.rotary_percent) == (5e5, 0.25)
    with pytest.raises(FamilyError, match=r"^glm4_moe: rope type \['linear'\] is not mapped"):
        model("glm4_moe", rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0})


def test_a_part_of_each_head_that_turns_is_the_same_in_both_keys() -> None:
    alone = model("minimax_m2", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert alone == model("minimax_m2", rotary_dim=None) == model("minimax_m2")
    with pytest.raises(FamilyError, match=r"^minimax_m2: rotary_dim=4, and partial_rotary_factor=0.5 of heads of 6;"):
        model("minimax_m2", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_only_full_attention_is_mapped_of_minimax_m2() -> None:
    assert model("minimax_m2", attn_type_list=[1] * 4) == model("minimax_m2")
    with pytest.raises(FamilyError, match=r"^minimax_m2: attn_type_list=\[1, 0, 1, 1\]: only full attention"):
        model("minimax_m2", attn_type_list=[1, 0, 1, 1])


def test_every_third_layer_of_experts() -> None:
    """transformers: where (layer + 1) % decoder_sparse_step is 0."""
    assert model("qwen3_moe", decoder_sparse_step=3).moe_layers == (False, False, True, False)
    assert model("qwen3_next", decoder_sparse_step=3, mlp_only_layers=None).moe_layers == (False, False, True, False)


def test_scores_of_the_chosen_experts_may_stay_as_they_are() -> None:
    assert model("qwen3_next", norm_topk_prob=False).norm_topk_prob is False


def test_all_layers_of_gpt_oss_may_see_everything() -> None:
    assert model("gpt_oss", layer_types=["full_attention"] * 4, sliding_window=None).window is None


def test_configs_of_hybrid_models_are_refused_with_the_reason() -> None:
    for name, changes, says in (
        ("gpt_oss", {"rope_parameters": None}, "config.json has no rope_parameters or rope_scaling; transformers"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must say .* each of 4 layers, not .*full_att"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types must say .* each of 4 layers, not .*full_att"),
        ("qwen3_next", {"linear_num_value_heads": 12}, "12 value heads do not divide over 8 key heads$"),
    ):
        with pytest.raises(FamilyError, match=f"^{name}: {says}"):
            model(name, **changes)


def test_limits_of_routing() -> None:
    assert model("qwen3_moe", num_experts_per_tok=16).top_k == 16
    assert model("deepseek_v3", num_experts_per_tok=5).top_k == 5  # 5 // 2 groups is 2
    for name, changes, says in (
        ("qwen3_moe", {"num_key_value_heads": 3}, "the KV groups do not divide the heads: 16 heads, 3 KV groups, "),
        ("qwen3_moe", {"num_experts_per_tok": 17}, "a token takes more experts than there are: 16 heads, "),
        ("glm4_moe", {"num_experts_per_tok": 1}, ".* top-1 of 16 experts: megatron-core does not normalise"),
        ("glm4_moe", {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}, "tied embeddings with multi-token"),
        (
            "deepseek_v3",
            {"n_group": 2, "topk_group": 1},
            ".* top-4 of 16 experts in 1 of 2 groups: megatron-core ranks",
        ),
    ):
        with pytest.raises(FamilyError, match=f"^{name}: {says}"):
            model(name, **changes)


def test_rows_of_a_place() -> None:
    m = model("glm4_moe_lite", mlp_layer_types=["dense", "sparse", "sparse", "dense"], num_nextn_predict_layers=1)
    rows = {row.megatron: row for row in families.mappings(m)}
    assert {name for name, row in rows.items() if row.present(m, None)} == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    dense, router = (rows[f"decoder.layers.{{layer}}.mlp.{part}.weight"] for part in ("linear_fc1", "router"))
    assert [dense.present(m, layer) for layer in range(5)] == [True, False, False, True, True]
    assert [router.present(m, layer) for layer in range(5)] == [False, True, True, False, False]
    assert SpecNames().of(router) == "decoder.layers.{layer}.mlp.router.weight"


def test_rows_of_gpt_oss_experts() -> None:
    """Weights over ETP, gate and up together; the bias of a row-parallel linear is whole on every rank."""
    rows = [row for row in families.mappings(model("gpt_oss")) if "{expert}" in row.megatron]
    layer, experts = "decoder.layers.{layer}.mlp.experts.", "model.layers.{layer}.mlp.experts."
    grouped = SpecNames(experts="grouped")
    assert [(row.megatron, grouped.of(row), row.sharding, [t.name for t in row.hf]) for row in rows] == [
        (
            f"{layer}local_experts.{{expert}}.{linear}.{parameter}",
            f"{layer}{linear}.{parameter}{{expert}}",
            how,
            [experts + name],
        )
        for linear, parameter, how, name in (
            ("linear_fc1", "weight", "gate_up", "gate_up_proj"),
            ("linear_fc1", "bias", "gate_up", "gate_up_proj_bias"),
            ("linear_fc2", "weight", "row", "down_proj"),
            ("linear_fc2", "bias", "replicate", "down_proj_bias"),
        )
    ]
    assert all(row.present(model("gpt_oss"), 0) for row in rows)


def test_what_is_no_known_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=r"^unknown model_type 'xyzzy'; families are deepseek_v3, .*, qwen3_vl_moe$"):
        families.read({"model_type": "xyzzy"})
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FamilyError, match=r"^cannot read a Hugging Face .*gone: No such file or directory$"):
        families.read(tmp_path / "gone")
    with pytest.raises(FamilyError, match=r"holds a JSON list, not a config object$"):
        families.read(tmp_path)
    with pytest.raises(FamilyError, match=r"^qwen3_moe: config.json has no num_experts or num_local_experts; "):
        families.read({k: v for k, v in CONFIGS["qwen3_moe"].items() if k != "num_experts"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "24"}, "hidden_size='24', and it must be a whole number from 1 to 100000000"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "could not convert string to float: 'x'"),
    ],
)
def test_a_value_of_another_kind_is_named_with_the_family(change: dict[str, Any], says: str) -> None:
    config = {**CONFIGS["deepseek_v3"], "rope_parameters": None, "rope_theta": 10_000.0, **change}
    with pytest.raises(FamilyError, match=f"^deepseek_v3: a value of this config has a wrong type or size: {says}"):
        families.read(config)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "'utf-8' codec can't decode"),
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "maximum recursion depth"),
        (b"[1]", None),
        (None, "not a regular file$"),
    ],
    ids=["bytes", "cut", "deep", "list", "pipe"],
)
def test_a_config_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes | None, says: str | None) -> None:
    path = tmp_path / "config.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(FamilyError, match=rf"from .*config\.json: {says}" if says else r"config\.json holds"):
        families.read(tmp_path)
