"""MXFP4 as gpt-oss is published: all numbers as transformers has them, read in slices, and parts that are amiss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeref import families
from moeref.bridge import BridgeError, ShardMap, hf_tensors, load
from moeref.bridge.checkpoint import Checkpoint
from moeref.bridge.loader import inventory
from moeref.bridge.mxfp4_blocks import BlockedWeight
from moeref.check import check
from moeref.families import UnmappedModelError
from moeref.layout import Layout
from moeref.shards import join, split
from tests.unit.models import CONFIGS
from tests.unit.test_loader import holder

pytestmark = pytest.mark.cpu
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
#: Half of 96 ends inside of a block.
CONFIG = {
    **CONFIGS["gpt_oss"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "dtype": "bfloat16",
    "quantization_config": MXFP4,
}
BOTH, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def drawn(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of a weight of this shape [experts, in, out]."""
    of, inputs, outputs = shape
    blocks = torch.randint(0, 256, (of, outputs, inputs // 32, 16)).to(torch.uint8)
    return blocks, torch.randint(115, 130, blocks.shape[:3]).to(torch.uint8)


def checkpoint_of(folder: Path, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """MXFP4 files of a small model, of which a change to None leaves one out, and what transformers makes of them."""
    torch.manual_seed(0)
    plain = {t.name: torch.randn(t.shape).bfloat16() for t in hf_tensors(ShardMap(families.read(CONFIG), Layout()))}
    files = dict(plain)
    for name in (BOTH, DOWN):
        blocks, scales = drawn(tuple(files.pop(name).shape))
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    held = {name: of for name, of in (files | changes).items() if of is not None}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, plain


def test_all_numbers_under_all_scales_are_those_of_transformers() -> None:
    """But for the last, which is no number by the standard."""
    octets = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    blocks = octets.expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    weight = BlockedWeight(blocks, scales, (1, 512, 255))
    made, want = weight.read((slice(0, 1), slice(0, 512), slice(0, 255))), convert_moe_packed_tensors(blocks, scales)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, want)
    assert torch.equal(made.signbit(), want.signbit())
    last = BlockedWeight(blocks[:, :1], torch.full_like(scales[:, :1], 255), (1, 512, 1))
    assert bool(last.read((0, slice(0, 512), slice(0, 1))).isnan().all())


class Watched:
    """A slice of safetensors that tells how much of it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.read = tensor, 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


@pytest.mark.parametrize(
    ("index", "octets"),
    [
        ((slice(0, 4), slice(0, 96), slice(0, 10)), 4 * 10 * 3 * 16),
        ((2, slice(0, 96), slice(4, 8)), 4 * 3 * 16),
        ((2, slice(48, 96), slice(0, 10)), 10 * 2 * 16),
        ((slice(1, 3), slice(31, 33), slice(9, 10)), 2 * 2 * 16),
        ((slice(1, 3), slice(64, 65), slice(0, 10)), 2 * 10 * 16),
    ],
)
def test_a_slice_is_that_of_the_whole_and_no_other_block_is_read(index: Any, octets: int) -> None:
    torch.manual_seed(0)
    blocks, scales = drawn((4, 96, 10))
    watched = Watched(blocks), Watched(scales)
    made = BlockedWeight(*watched, (4, 96, 10)).read(index)
    assert torch.equal(made, convert_moe_packed_tensors(blocks, scales)[index])
    assert [of.read for of in watched] == [octets, octets // 16]


@pytest.mark.parametrize("layout", ["ep=1", "tp=2,ep=4,etp=1", "tp=2,ep=2,etp=2,world=8"])
def test_ranks_load_what_bf16_files_of_the_same_numbers_give(layout: str, tmp_path: Path) -> None:
    """Under ETP 2 a rank's half of the inputs of `down_proj` ends inside of a block."""
    folder, plain = checkpoint_of(tmp_path)
    (tmp_path / "bf16").mkdir()
    save_file(plain, tmp_path / "bf16" / "model.safetensors")
    shard_map = ShardMap(families.read(CONFIG), Layout.parse(layout))
    for rank in range(shard_map.layout.world):
        held = []
        for of in (folder, tmp_path / "bf16"):
            chunks = holder(shard_map, rank)
            load(shard_map, rank, chunks, of)
            held.append(inventory(chunks))
        assert held[0].keys() == held[1].keys()
        assert [name for name, tensor in held[0].items() if not torch.equal(tensor, held[1][name])] == []


def test_a_folder_has_one_tensor_of_a_weight(tmp_path: Path) -> None:
    folder, plain = checkpoint_of(tmp_path)
    with Checkpoint(folder, mxfp4=True) as checkpoint:
        assert checkpoint.names == plain.keys()
        assert checkpoint.header(DOWN) == (DOWN, (32, 96, 64), "bfloat16")
        assert all(torch.equal(tensor, plain[name]) for name, tensor in checkpoint.tensors())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{DOWN}_scales": None}, r"they are \[32, 64, 3, 16, 'U8'\] and None \(None: not there\)"),
        ({f"{DOWN}_blocks": None}, r"they are None and \[32, 64, 3, 'U8'\]"),
        ({f"{DOWN}_scales": torch.zeros(32, 64, 2, dtype=torch.uint8)}, r"and \[32, 64, 2, 'U8'\]"),
        ({f"{DOWN}_scales": torch.zeros(32, 64, 3)}, r"and \[32, 64, 3, 'F32'\]"),
        ({f"{DOWN}_blocks": torch.zeros(32, 64, 3, 16)}, r"they are \[32, 64, 3, 16, 'F32'\]"),
        ({f"{DOWN}_blocks": torch.zeros(32, 64, 48, dtype=torch.uint8)}, r"they are \[32, 64, 48, 'U8'\]"),
        ({f"{DOWN}_blocks": torch.zeros(32, 64, 3, 8, dtype=torch.uint8)}, r"they are \[32, 64, 3, 8, 'U8'\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder, _ = checkpoint_of(tmp_path, **changes)
    shard_map = ShardMap(families.read(CONFIG), Layout())
    with pytest.raises(BridgeError, match=says) as refused:
        load(shard_map, 0, holder(shard_map, 0), folder)
    assert str(refused.value).startswith(f"{DOWN} is MXFP4: {DOWN}_blocks has to be [experts, out, in / 32, 16] U8")


def test_a_weight_of_another_size_is_refused(tmp_path: Path) -> None:
    blocks, scales = drawn((32, 64, 96))
    folder, _ = checkpoint_of(tmp_path, **{f"{DOWN}_blocks": blocks, f"{DOWN}_scales": scales})
    shard_map = ShardMap(families.read(CONFIG), Layout())
    with pytest.raises(BridgeError, match=r"down_proj has shape \[32, 64, 96\].*its last two dimensions are swapped"):
        load(shard_map, 0, holder(shard_map, 0), folder)


def test_files_of_a_config_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    folder, _ = checkpoint_of(tmp_path)
    shard_map = ShardMap(families.read({**CONFIG, "quantization_config": None}), Layout())
    with pytest.raises(BridgeError, match="the checkpoint is quantised, it has 2 tensors of scales"):
        load(shard_map, 0, holder(shard_map, 0), folder)


def test_shards_become_bf16_files_whose_config_says_so(tmp_path: Path) -> None:
    folder, plain = checkpoint_of(tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shards = split(ShardMap(families.read(CONFIG), Layout.parse("ep=2")), folder, tmp_path / "shards")
    back = join(shards, tmp_path / "back")
    made = {name: of for file in back.glob("*.safetensors") for name, of in load_file(file).items()}
    assert made.keys() == plain.keys()
    assert all(torch.equal(made[name], of) for name, of in plain.items())
    said = json.loads((back / "config.json").read_text())
    assert said == {key: value for key, value in CONFIG.items() if key != "quantization_config"}


def test_a_check_tells_what_loading_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    note = "MXFP4 files, blocks of 32 inputs: loading makes experts bf16, and export sends bf16"
    assert note in check(tmp_path, "ep=2").notes
    assert note not in check("gpt-oss-20b", "ep=8").notes
    named = "files of {} are published in MXFP4; by name its weights count as bf16, so load and send with its config"
    for name in ("gpt-oss-20b", "openai/gpt-oss-120b"):
        assert named.format(name) in check(name, "ep=8").notes
    assert not [text for text in check("mixtral-8x7b", "ep=8").notes if "MXFP4" in text]


def test_other_families_have_none() -> None:
    with pytest.raises(UnmappedModelError, match=r"^mixtral: the checkpoint is quantised \(mxfp4\), and only"):
        families.read({**CONFIGS["mixtral"], "quantization_config": MXFP4})
