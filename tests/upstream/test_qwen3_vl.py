"""Qwen3-VL with experts, as published: its tensors, and the logits of its text model in Megatron on two EP ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moeref import families
from moeref.bridge import BridgeError, ShardMap, load
from moeref.exporter import Plan, export
from moeref.families import FamilyError
from moeref.layout import Layout
from tests import warm
from tests.unit.test_loader import holder

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]

#: Without `norm_topk_prob`: transformers' class has none, and always normalises.
TEXT: dict[str, Any] = {
    "vocab_size": 132,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 3e3,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TOKENS = torch.arange(24).reshape(2, 12) * 5 % 131

RANK = """
import sys
import torch, torch.distributed as dist
from moeref import bridge, families, megatron
from moeref.layout import Layout
from moeref.record import Options, Record

rank, folder, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)
layout = Layout.parse("ep=2,world=2")
megatron.initialise(layout)
built = megatron.build(Record.of(families.read(folder), layout, options=Options()), rank)
bridge.load(built.shard_map, rank, built.chunks, folder)
logits = megatron.logits(built.chunks, built.shard_map, torch.load(f"{out}/tokens.pt"))
torch.save(logits.detach(), f"{out}/logits{rank}.pt")
"""


@pytest.fixture(scope="module")
def module() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    made = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made


@pytest.fixture(scope="module")
def saved(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def published(saved: Path, module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: experts are [in, out]. transformers reads the same model from it."""
    folder = tmp_path_factory.mktemp("published")
    files = load_file(saved / "model.safetensors")
    turned = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in files.items()}
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(saved / "config.json", folder)
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in module.state_dict().items())
    return folder


def test_every_tensor_of_the_text_model_comes_back(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = load_file(published / "model.safetensors")
    gate_up = files["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (4, 40, 48), "files hold [expert, in, out]"
    shard_map = ShardMap(families.read(published), Layout())
    chunks = holder(shard_map, 0)
    load(shard_map, 0, chunks, published)
    assert "tensors are left out, as the family says: model.visual." in caplog.text
    held = dict(chunks[0].named_parameters())["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert torch.equal(held, gate_up[3].T)
    got = {tensor.name: full.clone() for tensor, full in export(Plan(shard_map), 0, chunks)}
    want = {name: tensor for name, tensor in files.items() if not name.startswith("model.visual.")}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_a_folder_that_transformers_saves_from_memory_is_refused(saved: Path) -> None:
    shard_map = ShardMap(families.read(saved), Layout())
    with pytest.raises(BridgeError, match=r"experts.*has shape .*, the config says .*last two dimensions are swapped"):
        load(shard_map, 0, holder(shard_map, 0), saved)


def test_logits_of_text_are_those_of_transformers(
    module: Any, published: Path, tmp_path: Path, megatron_on_cpu: warm.Prepared
) -> None:
    torch.save(TOKENS, tmp_path / "tokens.pt")
    programs = warm.of_ranks(RANK, 2, str(published), str(tmp_path))
    ended = megatron_on_cpu.run_all(programs, cwd=tmp_path)
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stderr[-3000:] for one in ended)
    with torch.no_grad():
        want_BSV = module(TOKENS).logits
    for rank in range(2):
        got_BSV = torch.load(tmp_path / f"logits{rank}.pt")[..., : want_BSV.shape[-1]]
        torch.testing.assert_close(got_BSV, want_BSV, rtol=1e-4, atol=1e-5 * float(want_BSV.abs().max()))


def test_a_config_that_is_not_mapped_is_refused(module: Any) -> None:
    config = module.config.to_dict()
    with pytest.raises(FamilyError, match=r"qwen3_vl_moe: config.json has no text_config"):
        families.read({"model_type": "qwen3_vl_moe", **TEXT})
    with pytest.raises(FamilyError, match="qwen3_vl_moe: attention_bias=True is not mapped"):
        families.read({**config, "text_config": {**config["text_config"], "attention_bias": True}})
    with pytest.raises(FamilyError, match="qwen3_vl_moe: norm_topk_prob=False is not mapped"):
        families.read({**config, "text_config": {**config["text_config"], "norm_topk_prob": False}})


def test_the_published_sizes() -> None:
    """Qwen3-VL-30B-A3B has the text model of Qwen3-30B-A3B, whose experts are 2 tensors a layer instead of 384."""
    small = families.known("qwen3-30b-a3b")
    whole = {"model_type": "qwen3_vl_moe", "text_config": {**small, "model_type": "qwen3_vl_moe_text"}}
    tensors = Plan(ShardMap(families.read(whole), Layout.parse("tp=2,ep=8,etp=1"))).tensors
    assert len(tensors) == 48 * (2 + 9) + 3
    assert len(Plan(ShardMap(families.read(small), Layout())).tensors) == 48 * (128 * 3 + 9) + 3
