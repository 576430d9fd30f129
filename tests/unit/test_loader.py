"""Loading opens each file once, reads only what the rank needs, and puts it where the shard map says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeref.bridge import BridgeError, ShardMap, bind, checkpoint, hf_tensors, inventory, load
from moeref.layout import Layout
from moeref.torch_dtypes import TORCH
from tests.unit.models import model

pytestmark = pytest.mark.cpu


def holder(shard_map: ShardMap, rank: int, value: float = 7.0) -> list[torch.nn.Module]:
    """Bare modules with the parameters and buffers of `rank`, all set to `value`."""
    chunks = [torch.nn.Module() for _ in range(shard_map.layout.vpp)]
    for shard in shard_map.local_shards(rank):
        *path, name = shard.local_name.split(".")
        module = chunks[shard.chunk]
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        tensor = torch.full(shard.shape, value, dtype=TORCH[shard.param.dtype])
        if name == "expert_bias":
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return chunks


def write(folder: Path, tensors: dict[str, torch.Tensor], files: int = 3) -> None:
    """A sharded checkpoint with its index."""
    folder.mkdir(exist_ok=True)
    names, weight_map = sorted(tensors), {}
    for i in range(files):
        part = {n: tensors[n] for n in names[i::files]}
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def shard_map() -> ShardMap:
    return ShardMap(model("glm4_moe", num_hidden_layers=2), Layout.parse("tp=2,pp=2,ep=2,etp=1"))


@pytest.fixture
def tensors(shard_map: ShardMap) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {t.name: torch.randn(t.shape) for t in hf_tensors(shard_map)}


def test_loads_what_the_blocks_say_and_zeroes_the_padding(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "hf", tensors)
    for rank in range(shard_map.layout.world):
        chunks = holder(shard_map, rank)
        load(shard_map, rank, chunks, tmp_path / "hf")
        for shard, tensor in bind(shard_map, rank, chunks):
            covered = torch.zeros(shard.shape, dtype=torch.bool)
            for region in shard.regions:
                covered[region.shard_index] = True
                expected = tensors[shard.param.hf[region.tensor].name][region.hf_index]
                assert torch.equal(tensor[region.shard_index], expected)
            assert not tensor[~covered].any()


def test_each_file_is_opened_once_and_only_slices_are_read(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "hf", tensors)
    opened: list[Path] = []
    read = 0
    real_open, real_read = checkpoint.safe_open, checkpoint.Checkpoint.read

    def counting_open(path: Path, **kwargs: Any) -> Any:
        opened.append(path)
        return real_open(path, **kwargs)

    def counting_read(self: Any, name: str, index: Any) -> torch.Tensor:
        nonlocal read
        tensor = real_read(self, name, index)
        read += tensor.numel()
        return tensor

    monkeypatch.setattr(checkpoint, "safe_open", counting_open)
    monkeypatch.setattr(checkpoint.Checkpoint, "read", counting_read)
    chunks = holder(shard_map, 0)
    load(shard_map, 0, chunks, tmp_path / "hf")
    assert sorted(opened) == sorted((tmp_path / "hf").glob("*.safetensors"))
    held = sum(
        sum(torch.zeros(p.shape)[r.shard_index].numel() for r in p.regions) for p, _ in bind(shard_map, 0, chunks)
    )
    assert read == held


def test_fp32_bias_is_a_buffer_and_is_loaded(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "hf", tensors)
    chunks = holder(shard_map, 2)
    load(shard_map, 2, chunks, tmp_path / "hf")
    bias = inventory(chunks)[0, "decoder.layers.0.mlp.router.expert_bias"]
    assert torch.equal(bias, tensors["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_experts_are_loaded_alike_from_either_format(tmp_path: Path) -> None:
    """transformers 5 holds a layer's experts in one tensor, the expert first, gate above up."""
    shard_map = ShardMap(model("qwen3_moe", num_hidden_layers=1), Layout.parse("ep=2"), divisible_by=1)
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(shard_map)}
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    gate, up, down = (
        torch.stack([tensors[f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"] for e in range(16)])
        for part in ("gate", "up", "down")
    )
    fused["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
    fused["model.layers.0.mlp.experts.down_proj"] = down
    for name, files, expert_format in (("apart", tensors, "per_expert"), ("fused", fused, "fused")):
        assert shard_map.for_checkpoint(set(files)).expert_format == expert_format
        write(tmp_path / name, files)
        chunks = holder(shard_map, 1)
        load(shard_map, 1, chunks, tmp_path / name)
        held = inventory(chunks)
        assert held[0, "embedding.word_embeddings.weight"].shape == (131, 24)
        for expert in range(8):
            of = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc{}.weight"
            assert torch.equal(held[0, of.format(expert, 1)], torch.cat([gate[8 + expert], up[8 + expert]]))
            assert torch.equal(held[0, of.format(expert, 2)], down[8 + expert])


def test_matrices_of_gpt_oss_are_turned(tmp_path: Path) -> None:
    """Files have an expert's matrices as [in, out], gate and up alternating; Megatron has [out, in], all gate first."""
    shard_map = ShardMap(model("gpt_oss", num_hidden_layers=1), Layout.parse("ep=2"))
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(shard_map)}
    write(tmp_path, tensors)
    chunks = holder(shard_map, 1)
    load(shard_map, 1, chunks, tmp_path)
    held = inventory(chunks)
    both, down = (tensors[f"model.layers.0.mlp.experts.{name}_proj"][16 + 3] for name in ("gate_up", "down"))
    expert = "decoder.layers.0.mlp.experts.local_experts.3"
    assert torch.equal(held[0, f"{expert}.linear_fc1.weight"], torch.cat([both[:, 0::2].T, both[:, 1::2].T]))
    assert torch.equal(held[0, f"{expert}.linear_fc2.weight"], down.T)


def test_the_inventory_has_every_parameter_and_persistent_buffer() -> None:
    chunk, layer, attention = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    chunk.add_module("layer", layer)
    layer.add_module("attention", attention)
    for module in (chunk, layer, attention):
        module.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
        module.register_buffer("bias", torch.zeros(1))
    attention.register_buffer("inv_freq", torch.zeros(1), persistent=False)
    names = {f"{path}{name}" for path in ("", "layer.", "layer.attention.") for name in ("weight", "bias")}
    assert inventory([torch.nn.Module(), chunk]).keys() == {(1, name) for name in names}


def test_a_module_or_parameter_under_two_names_has_the_first() -> None:
    """As torch's `named_parameters` has it."""
    chunk, shared = torch.nn.Module(), torch.nn.Linear(1, 1)
    shared.register_buffer("scale", torch.zeros(1))
    for name, module in (("a", shared), ("b", shared), ("c", torch.nn.Linear(1, 1, bias=False))):
        chunk.add_module(name, module)
    chunk.c.register_parameter("tied", shared.weight)
    chunk.c.register_parameter("none", None)
    found = [name for _, name in inventory([chunk])]
    assert [name for name, _ in chunk.named_parameters()] == ["a.weight", "a.bias", "c.weight"]
    assert found == ["a.weight", "a.bias", "c.weight", "a.scale"]


def test_a_chunk_that_is_not_there_is_named(shard_map: ShardMap) -> None:
    with pytest.raises(BridgeError, match=r"rank 0 \(.*: chunk 0 has no embedding.word_embeddings.weight \(global "):
        bind(shard_map, 0, [])


def test_modules_that_differ_from_the_table_are_refused(shard_map: ShardMap) -> None:
    chunks = holder(shard_map, 3)
    chunks[0].register_parameter("adapter", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(BridgeError, match=r"rank 3 \(tp1 .*in no row of the table: chunk 0 adapter"):
        bind(shard_map, 3, chunks)
    del chunks[0].adapter
    layer = chunks[0].decoder.layers  # type: ignore[union-attr]
    norm = getattr(layer, "0").input_layernorm
    norm.weight = torch.nn.Parameter(torch.zeros(24, dtype=torch.bfloat16))
    with pytest.raises(BridgeError, match=r"the table says .* float32"):
        bind(shard_map, 3, chunks)
    del norm.weight
    with pytest.raises(BridgeError, match=r"has no decoder.layers.0.input_layernorm.weight"):
        bind(shard_map, 3, chunks)


def test_of_tensors_in_no_row_the_first_three_are_named(shard_map: ShardMap) -> None:
    chunks = holder(shard_map, 0)
    for name in "abcd":
        chunks[0].register_buffer(name, torch.zeros(1))
    names = "chunk 0 a, chunk 0 b, chunk 0 c"
    with pytest.raises(BridgeError, match=f": 4 tensors are in no row of the table: {names}; add a row to the family$"):
        bind(shard_map, 0, chunks)


def test_an_alias_that_differs_is_refused(tmp_path: Path) -> None:
    shard_map = ShardMap(model("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1), Layout.parse("tp=2"))
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(shard_map)}
    for original, alias in (("model.embed_tokens", "embed_tokens"), ("lm_head", "shared_head.head")):
        tensors[f"model.layers.2.{alias}.weight"] = tensors[f"{original}.weight"].clone()
    write(tmp_path / "good", tensors)
    chunks = holder(shard_map, 1)
    load(shard_map, 1, chunks, tmp_path / "good")
    rows = inventory(chunks)[0, "output_layer.weight"]
    assert torch.equal(rows[:3], tensors["lm_head.weight"][128:])
    tensors["model.layers.2.shared_head.head.weight"][130, 5] += 1
    write(tmp_path / "bad", tensors)
    with pytest.raises(BridgeError, match=r"model.layers.2.shared_head.head.weight differs from lm_head.weight"):
        load(shard_map, 1, chunks, tmp_path / "bad")
