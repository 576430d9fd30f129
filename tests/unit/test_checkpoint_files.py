"""A folder that is broken, or that does not fit the model, is refused by name before anything is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeref.bridge import BridgeError, Checkpoint, HFTensor, ShardMap, hf_tensors, inventory, load
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder, write

pytestmark = pytest.mark.cpu


@pytest.fixture
def shard_map() -> ShardMap:
    return ShardMap(model("glm4_moe", num_hidden_layers=2), Layout.parse("tp=2,pp=2,ep=2,etp=1"))


@pytest.fixture
def tensors(shard_map: ShardMap) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {t.name: torch.randn(t.shape) for t in hf_tensors(shard_map)}


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"not a safetensors file at all")


def _file_lost(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[2].unlink()


def _two_files_lost(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors"))[1:]:
        path.unlink()


def _index_lies(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.ghost.weight"] = next(iter(found["weight_map"].values()))
    index.write_text(json.dumps(found))


def _index_broken(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _index_text(text: str) -> Any:
    """The change that replaces the index by a text, of which each character is a byte."""
    return lambda folder: (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))


def _first_of_the_map(file: Any) -> Any:
    """The change that gives the first tensor of the index another file."""

    def change(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        found = json.loads(index.read_text())
        found["weight_map"][next(iter(found["weight_map"]))] = file
        index.write_text(json.dumps(found))

    return change


def _outside(folder: Path) -> None:
    """A file that exists, but not in the folder."""
    (folder.parent / "other.safetensors").write_bytes(b"")
    _first_of_the_map("../other.safetensors")(folder)


def _pipe_in_place_of(pattern: str) -> Any:
    def change(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        path.unlink()
        os.mkfifo(path)

    return change


def _index_is_a_broken_link(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").symlink_to(folder / "gone")


def _no_files(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncate, "not a whole safetensors file"),
        (_garbage, "not a whole safetensors file"),
        (_file_lost, "names files that are not there: model-00003-of-00003.safetensors$"),
        (_two_files_lost, "not there: model-00002-of-00003.safetensors, model-00003-of-00003.safetensors$"),
        (_index_lies, "disagree on 1 tensors, first model.ghost.weight"),
        (_index_broken, "index.json: not a safetensors index.*weight_map"),
        (_index_text("[1]"), "index.json: not a safetensors index.*weight_map.*again"),
        (_index_text("7"), "index.json: not a safetensors index.*weight_map.*again"),
        (_index_text('{"weight_map": [["a", "b"]]}'), "index.json: not a safetensors index.*weight_map.*again"),
        (_index_text('{"weight_map": "a"}'), "index.json: not a safetensors index.*weight_map.*again"),
        (_index_text('{"weight_map": null}'), "index.json: not a safetensors index.*weight_map.*again"),
        (_index_text('{"weight_map": {"a": "b\xff"}}'), "index.json: not a safetensors index.*utf-8.*again"),
        (_index_text("{"), "index.json: not a safetensors index.*again"),
        (_index_text("[" * 100_000), "index.json: not a safetensors index.*again"),
        (_first_of_the_map(3), "index.json: not a safetensors index.*weight_map.*again"),
        (_first_of_the_map(["a"]), "index.json: not a safetensors index.*weight_map.*again"),
        (_outside, "index.json: '../other.safetensors' is no file of this folder; .*again"),
        (_first_of_the_map("/etc/hostname"), "index.json: '/etc/hostname' is no file of this folder; .*again"),
        (_first_of_the_map(""), "index.json: names files that are not there: $"),
        (_first_of_the_map(".."), r"index.json: names files that are not there: \.\.$"),
        (_first_of_the_map("a\0b"), "names files that are not there: a"),
        (_pipe_in_place_of("*.safetensors"), "00001-of-00003.safetensors: not a regular file; .*again"),
        (_pipe_in_place_of("*.index.json"), "index.json: not a regular file; .*again"),
        (_index_is_a_broken_link, "index.json: not a regular file; .*again"),
        (_no_files, "no .*safetensors file"),
    ],
)
def test_bad_folders_are_refused_before_anything_is_written(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, spoil: Any, says: str
) -> None:
    write(tmp_path / "hf", tensors)
    spoil(tmp_path / "hf")
    chunks = holder(shard_map, 0)
    with pytest.raises(BridgeError, match=says):
        load(shard_map, 0, chunks, tmp_path / "hf")
    assert all((t == 7).all() for t in inventory(chunks).values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.norm.weight": None}, "1 tensors of the model are missing: model.norm.weight"),
        ({"model.layers.0.extra": torch.zeros(2)}, "belong to no row of the table: model.layers.0.extra"),
        (
            {f"model.layers.1.mlp.{part}_proj.weight_scale_inv": torch.ones(1) for part in ("up", "down")},
            r"is quantised, it has 2 tensors of scales: .*down_proj.weight_scale_inv.*; turn it into bf16 first",
        ),
        ({"model.norm.weight": torch.zeros(25)}, r"model.norm.weight has shape \[25\], the config says \[24\]"),
        ({"model.norm.weight": torch.zeros(24).bfloat16()}, "model.norm.weight is bfloat16, the model holds float32"),
        (
            {"model.norm.weight": torch.zeros(24).to(torch.float8_e4m3fn)},
            "model.norm.weight is F8_E4M3, the model holds float32",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    changed = {k: v for k, v in (tensors | change).items() if v is not None}
    write(tmp_path / "hf", changed)
    chunks = holder(shard_map, 1)
    with pytest.raises(BridgeError, match=says) as error:
        load(shard_map, 1, chunks, tmp_path / "hf")
    assert "glm4_moe" in str(error.value)
    assert shard_map.layout.text in str(error.value)
    assert all((t == 7).all() for t in inventory(chunks).values())


def refusal(shard_map: ShardMap, tensors: dict[str, torch.Tensor], folder: Path) -> str:
    """What loading says against these tensors."""
    write(folder, tensors)
    with pytest.raises(BridgeError) as error:
        load(shard_map, 0, holder(shard_map, 0), folder)
    start, _, says = str(error.value).partition("): ")
    assert start == f"glm4_moe: checkpoint {folder.name} does not fit the model ({shard_map.layout.text}"
    return says


@pytest.mark.parametrize(
    ("surplus", "says"),
    [
        (
            ["model.norms.weight"],
            "1 tensors belong to no row of the table: model.norms.weight "
            "(is model.norms.weight meant to be model.norm.weight?)",
        ),
        (["visual.norm.weight"], "1 tensors belong to no row of the table: visual.norm.weight"),
        (["v.a", "v.b", "v.c"], "3 tensors belong to no row of the table: v.a, v.b, v.c"),
        (["v.a", "v.b", "v.c", "v.d"], "4 tensors belong to no row of the table: v.a, v.b, v.c, … (1 more)"),
        (["v.a", "v.b", "v.c", "v.d", "v.e"], "5 tensors belong to no row of the table: v.a, v.b, v.c, … (2 more)"),
    ],
)
def test_a_surplus_tensor_may_be_a_missing_one_renamed(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, surplus: list[str], says: str
) -> None:
    tensors |= {name: torch.zeros(24) for name in surplus}
    del tensors["model.norm.weight"]
    missing = "1 tensors of the model are missing: model.norm.weight"
    assert refusal(shard_map, tensors, tmp_path) == f"{missing}; {says}"


def test_scales_are_counted_apart_from_other_surplus(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors |= {"model.layers.1.mlp.up_proj.weight_scale_inv": torch.ones(1), "visual.weight": torch.ones(1)}
    assert refusal(shard_map, tensors, tmp_path) == (
        "the checkpoint is quantised, it has 1 tensors of scales: model.layers.1.mlp.up_proj.weight_scale_inv; "
        "turn it into bf16 first; 1 tensors belong to no row of the table: visual.weight"
    )


@pytest.mark.parametrize(("wrong", "more"), [(5, ""), (6, ""), (7, "and 1 more"), (8, "and 2 more")])
def test_the_first_six_differences_are_said(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, wrong: int, more: str
) -> None:
    shapes = {name: list(tensors[name].shape) for name in sorted(tensors)[:wrong]}
    said = refusal(shard_map, tensors | {name: torch.zeros(1) for name in shapes}, tmp_path).split("; ")
    if more:
        assert said.pop() == more
    assert len(set(said)) == min(wrong, 6)
    assert set(said) <= {f"{name} has shape [1], the config says {shape}" for name, shape in shapes.items()}


def test_headers_say_name_shape_and_dtype(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(2, 3).bfloat16(), "b": torch.zeros(4), "c": torch.zeros(1, dtype=torch.uint8)})
    with Checkpoint(tmp_path) as opened:
        assert [opened.header(name) for name in "abc"] == [
            HFTensor("a", (2, 3), "bfloat16"),
            HFTensor("b", (4,), "float32"),
            HFTensor("c", (1,), "U8"),
        ]


def test_tensors_that_the_family_ignores_are_counted_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Qwen3-Next's multi-token prediction, which transformers leaves out too; any other surplus is refused."""
    shard_map = ShardMap(model("qwen3_next", num_hidden_layers=1), Layout())
    chunks = holder(shard_map, 0)
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(shard_map)}
    write(tmp_path, {**tensors, "mtp.fc.weight": torch.ones(2, 4), "mtp.norm.weight": torch.ones(2)})
    load(shard_map, 0, chunks, tmp_path)
    assert caplog.messages == ["qwen3_next: 2 tensors are left out, as the family says: mtp.fc.weight, mtp.norm.weight"]
    assert torch.equal(inventory(chunks)[0, "decoder.final_layernorm.weight"], tensors["model.norm.weight"])
    write(tmp_path, {**tensors, "mtp.fc.weight": torch.ones(2, 4), "model.mtp.weight": torch.ones(2)})
    with pytest.raises(BridgeError, match=r"1 tensors belong to no row of the table: model\.mtp\.weight"):
        load(shard_map, 0, chunks, tmp_path)


def test_same_tensor_in_two_files(shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write(tmp_path / "hf", tensors)
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.zeros(24)}, tmp_path / "hf" / "again.safetensors")
    with pytest.raises(BridgeError, match=r"model.norm.weight is already in another file"):
        load(shard_map, 0, holder(shard_map, 0), tmp_path / "hf")


def test_a_file_that_the_index_does_not_name_is_left_out_aloud(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers, vLLM and SGLang do: an earlier save with more shards has left it, or it repeats them all."""
    write(tmp_path, tensors)
    save_file({"model.norm.weight": torch.zeros(24)}, tmp_path / "model-00009-of-00009.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == tensors.keys()
        whole = (slice(None),)
        assert torch.equal(checkpoint.read("model.norm.weight", whole), tensors["model.norm.weight"])
    left_out = "consolidated.safetensors, model-00009-of-00009.safetensors"
    assert caplog.messages == [f"{tmp_path}: 2 files are left out, which the index does not name: {left_out}"]


def test_a_buffer_that_follows_from_the_config_is_left_out(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "hf", {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(shard_map, 0, holder(shard_map, 0), tmp_path / "hf")
    assert "1 tensors are left out" in caplog.text


def test_router_biases_in_bf16_are_widened_aloud(
    shard_map: ShardMap, tensors: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    write(tmp_path / "hf", {**tensors, bias: tensors[bias].bfloat16()})
    chunks = holder(shard_map, 2)
    load(shard_map, 2, chunks, tmp_path / "hf")
    assert caplog.messages == ["glm4_moe: 1 router biases are bfloat16 in the file and become float32"]
    held = inventory(chunks)[0, "decoder.layers.0.mlp.router.expert_bias"]
    assert torch.equal(held, tensors[bias].bfloat16().float())
    for name, dtype in ((bias, torch.float16), ("model.norm.weight", torch.bfloat16)):
        write(tmp_path / "hf", {**tensors, name: tensors[name].to(dtype)})
        told = str(dtype).removeprefix("torch.")
        with pytest.raises(BridgeError, match=f": {name} is {told}, the model holds float32$"):
            load(shard_map, 2, chunks, tmp_path / "hf")


def test_tensors_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.{part}" for layer in (2, 9, 10, 11, 100) for part in ("a", "b")]
    write(tmp_path, {name: torch.zeros(1) for name in names})
    with Checkpoint(tmp_path) as checkpoint:
        assert [name for name, _ in checkpoint.tensors()] == names


def test_all_tensors_are_read_whole(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write(tmp_path, tensors)
    with Checkpoint(tmp_path) as checkpoint:
        found = dict(checkpoint.tensors())
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert checkpoint.names == set()
