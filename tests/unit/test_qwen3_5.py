"""Qwen3.5 as published: a text model inside a model with a vision model, and parameters in fp32 beside bf16."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moeref import families
from moeref.bridge import BridgeError, ShardMap, bind, load
from moeref.exporter import Plan, export, quantised
from moeref.families import FamilyError
from moeref.layout import Layout
from tests.unit.test_loader import holder

pytestmark = pytest.mark.cpu

TEXT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    # Of text alone, every section has the same positions.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e3,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
}
KEPT = (".linear_attn.A_log", ".linear_attn.norm.weight")
#: As in published FP8 files, whose experts are a tensor each.
FP8_KEPT = [
    *("lm_head", "model.language_model.embed_tokens", "model.visual.blocks.0.attn.qkv"),
    *(
        f"model.language_model.layers.{layer}.{part}"
        for layer in range(4)
        for part in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba", "mlp.gate")
    ),
]
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [12, 12],
    "modules_to_not_convert": FP8_KEPT,
}
IN_FP8 = {
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"linear_attn.{part}.weight" for part in ("in_proj_qkv", "in_proj_z", "out_proj")),
    *(f"mlp.{part}.{of}_proj.weight" for part in ("shared_expert", "experts") for of in ("gate", "up", "down")),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as published: bf16 but for what stays fp32, experts fused, and tensors of a vision model and MTP."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    config = transformers.Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    state = {n: t if n.endswith(KEPT) else t.bfloat16() for n, t in model.state_dict().items()}
    save_file({**state, "mtp.norm.weight": torch.ones(40)}, folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


def test_a_published_checkpoint_loads_and_is_exported_without_its_vision_model(
    published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard_map = ShardMap(families.read(published), Layout()).in_format("fused")
    chunks = holder(shard_map, 0)
    load(shard_map, 0, chunks, published)
    assert "tensors are left out, as the family says: model.visual.blocks.0.attn.proj.bias" in caplog.text
    got = {tensor.name: full.clone() for tensor, full in export(Plan(shard_map), 0, chunks)}
    want = {n: t for n, t in load_file(published / "model.safetensors").items() if not n.startswith(("mtp", "model.v"))}
    assert got.keys() == want.keys()
    assert {n for n, t in got.items() if t.dtype is torch.float32} == {n for n in got if n.endswith(KEPT)}
    assert all(got[n].dtype is t.dtype and torch.equal(got[n], t) for n, t in want.items())


def test_a_rank_has_its_heads_of_each_linear(published: Path) -> None:
    shard_map = ShardMap(families.read(published), Layout.parse("tp=2,etp=1"))
    chunks = holder(shard_map, 1)
    load(shard_map, 1, chunks, published)
    held = {shard.param.name: tensor for shard, tensor in bind(shard_map.for_checkpoint(set()), 1, chunks)}
    full = load_file(published / "model.safetensors")
    net = "model.language_model.layers.0.linear_attn.in_proj_"
    q, k, v = full[net + "qkv.weight"].split([24, 24, 80])
    parts = (q, k, v, *(full[f"{net}{name}.weight"] for name in ("z", "b", "a")))
    assert torch.equal(
        held["decoder.layers.0.self_attention.in_proj.weight"], torch.cat([part.chunk(2)[1] for part in parts])
    )


def test_decays_in_bf16_are_widened_with_a_warning(
    published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {n: t.bfloat16() for n, t in load_file(published / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shard_map = ShardMap(families.read(published), Layout())
    chunks = holder(shard_map, 0)
    load(shard_map, 0, chunks, tmp_path)
    assert "6 tensors are bfloat16 in the file and become float32" in caplog.text
    held = dict(chunks[0].named_parameters())["decoder.layers.0.self_attention.A_log"]
    assert torch.equal(held, state["model.language_model.layers.0.linear_attn.A_log"].float())


def test_a_model_whose_decays_are_bf16_is_refused(published: Path) -> None:
    shard_map = ShardMap(families.read(published), Layout())
    chunks = holder(shard_map, 0)
    chunks[0].bfloat16()
    with pytest.raises(BridgeError, match=r"A_log is \[8\] torch.bfloat16, the table says \[8\] float32"):
        load(shard_map, 0, chunks, published)


def test_the_text_model_of_its_own_has_the_same_tensors_without_the_prefix(published: Path) -> None:
    config = json.loads((published / "config.json").read_text())
    whole, text = families.read(config), families.read({**config["text_config"], "dtype": "bfloat16"})
    names = [[t.name for t in Plan(ShardMap(model, Layout())).tensors] for model in (whole, text)]
    assert [name.replace("model.language_model.", "model.") for name in names[0]] == names[1]
    assert all(not name.startswith("model.language_model.") for name in names[1])


def test_a_config_without_its_text_model_is_refused() -> None:
    with pytest.raises(FamilyError, match=r"qwen3_5_moe: config.json has no text_config"):
        families.read({"model_type": "qwen3_5_moe", **TEXT})


def test_values_inside_text_config_are_checked(published: Path) -> None:
    config = json.loads((published / "config.json").read_text())
    with pytest.raises(FamilyError, match="num_experts='four'"):
        families.read({**config, "text_config": {**config["text_config"], "num_experts": "four"}})
    with pytest.raises(FamilyError, match="attn_output_gate=False is not mapped"):
        families.read({**config, "text_config": {**config["text_config"], "attn_output_gate": False}})


def test_the_published_sizes() -> None:
    """Qwen3.5-35B-A3B: the defaults of transformers' config, as in slime's scripts/models/qwen3.5-35B-A3B.sh."""
    config = transformers.Qwen3_5MoeConfig()
    with torch.device("meta"):
        module = transformers.Qwen3_5MoeForCausalLM(config.text_config)
    model = families.read(config.to_dict())
    tensors = Plan(ShardMap(model, Layout.parse("tp=2,pp=2,ep=8,etp=1"))).tensors
    assert (model.num_layers, model.experts, model.top_k, model.kv_groups) == (40, 256, 8, 2)
    assert sum(prod(t.shape) for t in tensors) == sum(p.numel() for p in module.parameters()) == 34_660_610_688


def exported(published: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a model with the weights of `published` exports, experts a tensor each."""
    source = ShardMap(families.read(published), Layout())
    chunks = holder(source, 0)
    load(source, 0, chunks, published)
    return {
        tensor.name: full.clone() for tensor, full in export(Plan(ShardMap(families.read(config), Layout())), 0, chunks)
    }


def test_what_is_sent_in_fp8_loads_again(published: Path, tmp_path: Path) -> None:
    config = {**json.loads((published / "config.json").read_text()), "quantization_config": FP8}
    plain = exported(published, config)
    sent = {name: tensor for name, tensor in quantised(plain.items(), config) if tensor is not None}
    scaled = {name.removesuffix("_scale_inv") for name in sent if name.endswith("_scale_inv")}
    assert {re.sub(r".*layers\.\d+\.|(?<=experts\.)\d+\.", "", name) for name in scaled} == IN_FP8
    files = {n: t.bfloat16() if n.endswith("_scale_inv") else t for n, t in sent.items()}
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shard_map = ShardMap(families.read(config), Layout())
    chunks = holder(shard_map, 0)
    load(shard_map, 0, chunks, tmp_path)
    again = {tensor.name: full for tensor, full in export(Plan(shard_map), 0, chunks)}
    assert again.keys() == plain.keys()
    for name, tensor in plain.items():
        if name in scaled:
            assert float((again[name] - tensor).float().abs().max()) < 0.05 * float(tensor.float().abs().max())
        else:
            assert torch.equal(again[name], tensor)


def test_a_text_model_keeps_what_the_whole_model_lists(published: Path) -> None:
    """Its names have no `language_model`: transformers quantised what the list keeps (transformers#48349)."""
    whole = {**json.loads((published / "config.json").read_text()), "quantization_config": FP8}
    names = [f"model.layers.0.linear_attn.in_proj_{part}.weight" for part in ("a", "b", "qkv")]
    sent = [name for name, _ in quantised(((name, torch.ones(24, 12)) for name in names), whole)]
    assert sent == [*names, f"{names[2]}_scale_inv"]


@pytest.mark.parametrize(
    ("experts", "decoder", "mtp"),
    [
        ("per_expert", "0.gate_proj.weight", "0.gate_proj.weight"),  # FP8 files
        ("fused_decoder", "gate_up_proj", "0.gate_proj.weight"),  # Qwen3.5
        ("fused", "gate_up_proj", "gate_up_proj"),  # Qwen3.6
    ],
)
def test_the_mtp_layer_has_a_form_of_its_own(experts: Any, decoder: str, mtp: str) -> None:
    more = {
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "mtp_num_hidden_layers": 1,
    }
    text = {**TEXT, **more, "model_type": "qwen3_5_moe_text"}
    model = families.read({"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False})
    assert (model.mtp_layers, model.ignored, model.with_mtp(0).ignored) == (
        1,
        ("model.visual.",),
        ("mtp.", "model.visual."),
    )
    shards = ShardMap(model, Layout(), expert_format=experts)
    names = {tensor.name for tensor in Plan(shards).tensors}
    assert f"model.language_model.layers.0.mlp.experts.{decoder}" in names
    assert f"mtp.layers.0.mlp.experts.{mtp}" in names
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < names
    assert ShardMap(model, Layout()).for_checkpoint(names) == shards
    with pytest.raises(FamilyError, match="mtp_num_hidden_layers=2 is not mapped"):
        families.read({**text, "mtp_num_hidden_layers": 2})
