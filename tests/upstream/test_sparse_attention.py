"""Sparse attention: which channels an indexer turns, what gradients reach, and where shared keys cannot be computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import warm

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]

SIZES: dict[str, Any] = {
    "vocab_size": 132,
    "hidden_size": 40,
    "intermediate_size": 144,
    "moe_intermediate_size": 56,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3e3},
    "index_n_heads": 8,
    "index_head_dim": 12,
    "index_topk": 5,
}
SHARING = {"indexer_types": ["full", "shared", "full"]}
#: Which channel of rope in halves each channel of rope in neighbours is; the last four are not turned.
NEIGHBOURS = [0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11]
TOKENS = torch.arange(32).reshape(2, 16) * 5 % 131

RANK = """
import sys
import torch, torch.distributed as dist
from moeref import bridge, families, megatron
from moeref.config import ConfigError, MoEConfig
from moeref.layout import Layout
from moeref.record import Options, Record

folder, out, granularity = sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=0, world_size=1)
megatron.initialise(Layout())
uniform = {"recompute_granularity": granularity, "recompute_method": "uniform", "recompute_num_layers": 1}
asked = MoEConfig(transformer_config_kwargs=uniform if granularity == "full" else {})
built = megatron.build(Record.of(families.read(folder, "float32"), Layout(), asked, Options()), 0)
bridge.load(built.shard_map, 0, built.chunks, folder)
tokens = torch.load(f"{out}/tokens.pt")
torch.save(megatron.logits(built.chunks, built.shard_map, tokens).detach(), f"{out}/logits.pt")
torch.save([name for name, of in built.chunks[0].named_parameters() if not of.requires_grad], f"{out}/frozen.pt")
if granularity:
    try:
        megatron.gradients(built.chunks, built.shard_map, tokens)
    except ConfigError as error:
        print(error)
"""


def made(**more: Any) -> Any:
    """transformers' model with random weights, in which norms and biases tell too."""
    torch.manual_seed(0)
    model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**SIZES, **more)).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def in_megatron(folder: Path, out: Path, prepared: warm.Prepared, granularity: str = "") -> str:
    """What a rank prints that loads the folder; it leaves its logits and the names of what is frozen."""
    torch.save(TOKENS, out / "tokens.pt")
    (program,) = warm.of_ranks(RANK, 1, str(folder), str(out), granularity)
    done = prepared.run(program, cwd=out)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout)


def test_an_indexer_turns_neighbours_where_its_config_says_so(tmp_path: Path, megatron_on_cpu: warm.Prepared) -> None:
    """transformers turns halves, so it computes the same of the channels in its order."""
    model, folder = made(), tmp_path / "model"
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("indexer.wk.weight", "indexer.k_norm.weight", "indexer.k_norm.bias")):
            tensors[name] = tensor[NEIGHBOURS].contiguous()
        elif name.endswith("indexer.wq_b.weight"):
            tensors[name] = tensor.view(8, 12, -1)[:, NEIGHBOURS].reshape(tensor.shape).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "indexer_rope_interleave": True}))
    in_megatron(folder, tmp_path, megatron_on_cpu)
    with torch.no_grad():
        want_BSV = model(TOKENS).logits
    got_BSV = torch.load(tmp_path / "logits.pt")[..., :132]
    torch.testing.assert_close(got_BSV, want_BSV, rtol=1e-4, atol=1e-5 * float(want_BSV.abs().max()))


def test_what_is_frozen_is_what_gradients_do_not_reach(tmp_path: Path, megatron_on_cpu: warm.Prepared) -> None:
    model = made(**SHARING)
    model.save_pretrained(tmp_path / "model")
    in_megatron(tmp_path / "model", tmp_path, megatron_on_cpu)
    model(TOKENS).logits.logsumexp(-1).sum().backward()
    unreached = {name for name, of in model.named_parameters() if of.grad is None}
    assert unreached == {name for name, _ in model.named_parameters() if ".self_attn.indexer." in name}
    frozen = torch.load(tmp_path / "frozen.pt")
    assert len(frozen) == len(unreached) == 2 * 5
    assert all(".core_attention.indexer." in name for name in frozen)


def test_shared_keys_are_not_computed_again_without_packing(tmp_path: Path, megatron_on_cpu: warm.Prepared) -> None:
    made(**SHARING).save_pretrained(tmp_path / "model")
    said = in_megatron(tmp_path / "model", tmp_path, megatron_on_cpu, "full")
    assert "recompute_granularity='full' with layers that share their keys" in said
    assert "give packed samples, or do not recompute attention" in said
