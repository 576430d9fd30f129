"""Families read configs strictly: what they cannot express is an error that says what and where."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from moeref import families
from moeref.bridge import ShardMap
from moeref.config.settings import transformer_settings
from moeref.exporter import Plan
from moeref.families import FamilyError
from moeref.families.model import UnmappedModelError, Window, Yarn
from moeref.layout import Layout, LayoutError
from tests.unit.models import CONFIGS, YARN, model

pytestmark = pytest.mark.cpu


def test_unknown_model_type_lists_the_families() -> None:
    known = r"deepseek_v3, deepseek_v32, glm4_moe.* kimi_k2, kimi_k25, minimax_m2, mixtral, .*qwen3_5_moe_text, qwen3_m"
    with pytest.raises(FamilyError, match=known) as error:
        families.read({"model_type": "qwen3_mo"})
    assert "did you mean qwen3_moe" in str(error.value)
    with pytest.raises(FamilyError, match=rf"{known}oe, qwen3_next, qwen3_vl_moe$"):
        families.read({"model_type": "gpt_neox"})  # no family's name is near enough to be meant


def test_modules_with_a_table_are_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_helper.py").write_text('NAME = "toy_helper"\n')
    (tmp_path / "toy_plain.py").write_text('NAME, MAPPINGS = "toy_plain", ("a mapping",)\nread = len\n')
    (tmp_path / "toy_other.py").write_text('NAME, MAPPINGS, ALIASES = "toy_other", (), ("toy_alias",)\nread = len\n')
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = families.discover()
    assert {name: found[name] for name in found.keys() - families.FAMILIES.keys()} == {
        "toy_plain": (len, ("a mapping",), ()),
        "toy_other": (len, (), ("toy_alias",)),
    }
    assert all(found[name] == family for name, family in families.FAMILIES.items())


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
        ("gpt_oss", {"attention_bias": False}),
        ("gpt_oss", {"swiglu_limit": 5.0}),
        ("gpt_oss", {"sliding_window": None}),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"] * 2}),
        ("gpt_oss", {"rope_parameters": None}),
        ("gpt_oss", {"rope_parameters": {**YARN}}),
        ("gpt_oss", {"quantization_config": {"quant_method": "quark"}}),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"] * 2}),
        ("qwen3_next", {"linear_num_value_heads": 12}),
        ("qwen3_next", {"attention_bias": True}),
        ("qwen3_next", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
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
    names = {t.name for row in families.mappings(m) if row.present(m, 4) for t in row.hf}
    decoder = {t.name for row in families.mappings(m) if row.present(m, 3) for t in row.hf}
    assert names - decoder == {
        f"model.layers.{{layer}}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }
    assert decoder <= names
    aliases = {row.hf[0].name: [t.name for t in row.hf[1:]] for row in families.mappings(m) if row.alias}
    assert aliases == {
        "model.embed_tokens.weight": ["model.layers.4.embed_tokens.weight"],
        "lm_head.weight": ["model.layers.4.shared_head.head.weight"],
    }
    assert all(len(row.hf) == 1 for row in families.mappings(model("glm4_moe")) if row.alias)


def rows_at(q_lora_rank: int | None, layer: int) -> list[families.ParamMapping]:
    """The rows of a DeepSeek-V3 layer."""
    m = model("deepseek_v3", q_lora_rank=q_lora_rank)
    return [row for row in families.mappings(m) if row.present(m, layer)]


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
    for row in families.mappings(m):
        for tensor in (*row.hf, *([row.fused] if row.fused else [])):
            assert set(tensor.dims) <= m.dims.keys()


#: `config.json` of Qwen/Qwen3-Next-80B-A3B-Instruct as published, but for token ids and training.
QWEN3_NEXT: dict[str, object] = {
    "model_type": "qwen3_next",
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_qwen3_next() -> None:
    """79.67 billion parameters, as published: 80B; of each layer 3·512 experts' tensors and 5 + 2 around the router,
    7 + 1 more in the 36 layers of gated delta nets and 6 + 1 in the 12 of attention."""
    m = families.read(QWEN3_NEXT)
    assert (m.num_layers, m.hidden, m.experts, m.top_k, m.moe_ffn, m.shared_ffn) == (48, 2048, 512, 10, 512, 512)
    assert (m.heads, m.kv_groups, m.head_dim, m.rotary_percent, m.rope_theta) == (16, 2, 256, 0.25, 1e7)
    assert m.gated_delta_net is not None
    assert m.gated_delta_net.layers == (True, True, True, False) * 12
    assert (
        m.gated_delta_net.dims["gdn_qkvz"],
        m.gated_delta_net.dims["gdn_ba"],
        m.gated_delta_net.dims["gdn_qkv"],
    ) == (12288, 64, 8192)
    assert m.moe_layers == (True,) * 48
    plan = Plan(ShardMap(m, Layout.parse("tp=2,pp=4,ep=8,etp=1")))
    by_name = {t.name: t.shape for t in plan.tensors}
    assert by_name["model.layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert by_name["model.layers.3.mlp.shared_expert_gate.weight"] == (1, 2048)
    assert by_name["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert by_name["model.layers.0.linear_attn.out_proj.weight"] == (2048, 4096)
    assert len(plan.tensors) == 3 + 48 * (3 * 512 + 6) + 36 * 8 + 12 * 7
    assert sum(prod(t.shape) for t in plan.tensors) == 79_674_391_296


def test_settings_of_qwen3_next() -> None:
    settings = transformer_settings(families.read(QWEN3_NEXT), Layout.parse("tp=2"))
    assert settings["linear_attention_freq"].value == [1, 1, 1, 0] * 12
    for name in ("attention_output_gate", "moe_shared_expert_gate", "layernorm_zero_centered_gamma"):
        assert settings[name].value is True
    with pytest.raises(LayoutError, match="qwen3_next: context parallelism deals a TP rank's key heads out"):
        transformer_settings(families.read(QWEN3_NEXT), Layout.parse("cp=3"))


def test_layer_types_win_over_the_interval() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    delta = model("qwen3_next", layer_types=kinds, full_attention_interval=2).gated_delta_net
    assert delta is not None
    assert delta.layers == (False, True, True, False)


#: `config.json` of openai/gpt-oss-20b as published, but for `quantization_config`; gpt-oss-120b differs in two keys.
GPT_OSS: dict[str, object] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


@pytest.mark.parametrize(("layers", "experts", "total"), [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)])
def test_published_gpt_oss(layers: int, experts: int, total: int) -> None:
    """The counts are the sums over the tensors of the bf16 checkpoints, 20.9 and 116.8 billion."""
    m = families.read({**GPT_OSS, "num_hidden_layers": layers, "num_local_experts": experts})
    assert (m.num_layers, m.experts, m.top_k, m.hidden, m.moe_ffn) == (layers, experts, 4, 2880, 2880)
    assert (m.heads, m.kv_groups, m.head_dim, m.vocab, m.clamp) == (64, 8, 64, 201088, 7.0)
    assert m.window == Window(128, (True, False) * (layers // 2))
    yarn = Yarn(
        factor=32.0,
        original_positions=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=0.0,
        truncate=False,
    )
    assert (m.rope_theta, m.yarn, m.mla) == (150_000.0, yarn, None)
    plan = Plan(ShardMap(m, Layout.parse("tp=8,ep=4,etp=1")))
    assert len(plan.tensors) == 3 + 17 * layers
    assert sum(prod(t.shape) for t in plan.tensors) == total
    assert {t.dtype for t in plan.tensors} == {"bfloat16"}


def test_published_gpt_oss_is_quantised() -> None:
    assert families.read({**GPT_OSS, "quantization_config": MXFP4}) == replace(families.read(GPT_OSS), mxfp4=True)
    with pytest.raises(FamilyError, match=r"gpt_oss: the checkpoint is quantised \(bitsandbytes\), and only FP8"):
        families.read({**GPT_OSS, "quantization_config": {"quant_method": "bitsandbytes"}})


def test_a_layout_that_megatron_cannot_give_gpt_oss_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"biases of experts at ETP 1 only.*etp=2"):
        transformer_settings(model("gpt_oss"), Layout.parse("tp=2"))


def test_settings_of_gpt_oss() -> None:
    """megatron-core counts the tokens before the query's own; the first layer is layer 1 there and slides."""
    settings = transformer_settings(families.read(GPT_OSS), Layout())
    assert settings["window_size"].value == (127, 0)
    assert settings["window_attn_skip_freq"].value == [1, 0] * 12
    assert settings["softmax_type"].value == "learnable"
    assert settings["add_bias_linear"].value
    assert (settings["glu_linear_offset"].value, settings["activation_func_clamp_value"].value) == (1.0, 7.0)
    assert settings["yarn_correction_range_round_to_int"].value is False


def test_a_run_with_fewer_mtp_layers_ignores_the_tensors_of_the_others() -> None:
    whole = model("glm4_moe", num_nextn_predict_layers=2)
    assert (whole.num_layers, whole.mtp_layers, whole.ignored) == (4, 2, ())
    one, none = whole.with_mtp(1), whole.with_mtp(0)
    assert (one.mtp_layers, one.ignored) == (1, ("model.layers.5.",))
    assert (none.mtp_layers, none.ignored) == (0, ("model.layers.4.", "model.layers.5."))
    assert one.with_mtp(0).ignored == ("model.layers.5.", "model.layers.4.")
    with pytest.raises(UnmappedModelError, match=r"^glm4_moe: mtp_num_layers=3: its files have 2 such layers$"):
        whole.with_mtp(3)


def test_qwen3_next_has_an_mtp_layer_if_its_config_or_the_run_says_so() -> None:
    published, given = model("qwen3_next"), model("qwen3_next", num_nextn_predict_layers=1)
    assert (published.mtp_layers, published.ignored, published.most_mtp_layers) == (0, ("mtp.",), 1)
    assert (given.mtp_layers, given.ignored, given.most_mtp_layers) == (1, (), 1)
    assert (published.with_mtp(1), given.with_mtp(0)) == (given, published)
    assert (model("glm4_moe").most_mtp_layers, model("qwen3_next", tie_word_embeddings=True).most_mtp_layers) == (0, 0)
    with pytest.raises(FamilyError, match=r"^qwen3_next: num_nextn_predict_layers=2 is not mapped; published files h"):
        model("qwen3_next", num_nextn_predict_layers=2)
    with pytest.raises(UnmappedModelError, match=r"^qwen3_next: mtp_num_layers=1: its files have 0 such layers with a"):
        model("qwen3_next", num_nextn_predict_layers=1, tie_word_embeddings=True)
