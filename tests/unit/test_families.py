"""Families read configs strictly: what they cannot express is an error that says what and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeref import families
from moeref.families import FamilyError
from tests.unit.models import CONFIGS, YARN, model

pytestmark = pytest.mark.cpu


def test_unknown_model_type_lists_the_families() -> None:
    with pytest.raises(FamilyError, match="deepseek_v3, glm4_moe, glm4_moe_lite, mixtral, qwen3_moe") as error:
        families.read({"model_type": "qwen3_mo"})
    assert "did you mean qwen3_moe" in str(error.value)


KEYS = ("hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in CONFIGS for key in KEYS if key in CONFIGS[name]])
def test_missing_key_is_named(name: str, key: str) -> None:
    config = {k: v for k, v in CONFIGS[name].items() if k != key}
    with pytest.raises(FamilyError, match=f"{name}.*{key}"):
        families.read(config)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("glm4_moe", {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}),
        ("glm4_moe", {"norm_topk_prob": False}),
        ("glm4_moe", {"num_experts_per_tok": 1}),
        ("glm4_moe", {"quantization_config": {"quant_method": "fp8"}}),
        ("mixtral", {"sliding_window": 4096}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("deepseek_v3", {"attention_bias": True}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"num_key_value_heads": 8}),
        ("deepseek_v3", {"num_experts_per_tok": 3, "topk_group": 1}),
        ("deepseek_v3", {"n_group": 3}),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.0}}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.0}}),
        ("deepseek_v3", {"rope_parameters": {k: v for k, v in YARN.items() if k != "factor"}}),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse", "linear"]}),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("qwen3_moe", {"num_key_value_heads": 3}),
        ("qwen3_moe", {"num_experts_per_tok": 17}),
    ],
)
def test_what_the_table_cannot_express_is_refused(name: str, change: dict[str, object]) -> None:
    with pytest.raises(FamilyError):
        model(name, **change)


def test_dense_layers() -> None:
    assert model("glm4_moe", first_k_dense_replace=3).moe_layers == (False, False, False, True)
    assert model("deepseek_v3", first_k_dense_replace=1).moe_layers == (False, True, True, True)
    assert model("glm4_moe_lite").moe_layers == (False, True, True, True)
    assert model("glm4_moe_lite", mlp_layer_types=["sparse", "dense", "dense", "sparse"]).moe_layers == (
        True,
        False,
        False,
        True,
    )
    assert model("qwen3_moe", mlp_only_layers=[2]).moe_layers == (True, True, False, True)
    assert model("qwen3_moe", decoder_sparse_step=2).moe_layers == (False, True, False, True)


def test_rope_in_both_places() -> None:
    old = {k: v for k, v in CONFIGS["glm4_moe"].items() if k != "rope_parameters"}
    read = families.read({**old, "rope_theta": 5e5, "partial_rotary_factor": 0.25})
    assert (read.rope_theta, read.rotary_percent) == (5e5, 0.25)
    assert model("glm4_moe").rotary_percent == 0.5


def test_yarn_in_both_places() -> None:
    old = {k: v for k, v in CONFIGS["deepseek_v3"].items() if k != "rope_parameters"}
    scaling = {"type": "yarn", **{k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")}}
    read = families.read({**old, "rope_theta": YARN["rope_theta"], "rope_scaling": scaling})
    assert read == model("deepseek_v3")
    assert read.mla is not None
    assert read.mla.yarn is not None
    assert (read.rope_theta, read.mla.yarn.factor, read.mla.yarn.original_positions) == (10_000.0, 4.0, 16)


def test_mscale_alone_means_nothing() -> None:
    """As in transformers, which reads mscale only together with mscale_all_dim."""
    yarn = model("deepseek_v3", rope_parameters={**YARN, "mscale_all_dim": 0.0}).mla.yarn  # type: ignore[union-attr]
    assert yarn is not None
    assert (yarn.mscale, yarn.mscale_all_dim) == (1.0, 0.0)


def test_queries_with_and_without_a_latent() -> None:
    names = {
        rank: {t.name.split(".self_attn.")[1] for row in rows_at(rank, 0) for t in row.hf if ".self_attn." in t.name}
        for rank in (24, None)
    }
    assert names[24] - names[None] == {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"}
    assert names[None] - names[24] == {"q_proj.weight"}


def test_mtp_layers_follow_the_decoders_and_are_of_its_last_kind() -> None:
    m = model("glm4_moe", num_nextn_predict_layers=1)
    assert (m.num_layers, m.mtp_layers, len(m.moe_layers)) == (4, 1, 4)
    names = {t.name for row in families.rows(m) if row.present(m, 4) for t in row.hf}
    decoder = {t.name for row in families.rows(m) if row.present(m, 3) for t in row.hf}
    assert names - decoder == {
        f"model.layers.{{layer}}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }
    assert decoder <= names
    aliases = {row.hf[0].name: [t.name for t in row.hf[1:]] for row in families.rows(m) if row.alias}
    assert aliases == {
        "model.embed_tokens.weight": ["model.layers.4.embed_tokens.weight"],
        "lm_head.weight": ["model.layers.4.shared_head.head.weight"],
    }
    assert all(len(row.hf) == 1 for row in families.rows(model("glm4_moe")) if row.alias)


def rows_at(q_lora_rank: int | None, layer: int) -> list[families.Row]:
    """The rows of a DeepSeek-V3 layer."""
    m = model("deepseek_v3", q_lora_rank=q_lora_rank)
    return [row for row in families.rows(m) if row.present(m, layer)]


def test_reads_a_folder_and_refuses_what_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="cannot read"):
        families.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    assert families.read(tmp_path) == families.read(tmp_path / "config.json") == model("qwen3_moe")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FamilyError, match="not a config object"):
        families.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FamilyError, match="cannot read"):
        families.read(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_dimension_of_the_table_is_known(name: str) -> None:
    m = model(name)
    for row in families.rows(m):
        for tensor in (*row.hf, *([row.fused] if row.fused else [])):
            assert set(tensor.dims) <= m.dims.keys()
