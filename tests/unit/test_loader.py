"""Loading refuses bad folders before it writes anything, opens each file once, and reads only what the rank needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeref.bridge import BridgeError, Table, bind, checkpoint, hf_tensors, inventory, load
from moeref.bridge.loader import DTYPES
from moeref.layout import Layout
from tests.unit.models import model

pytestmark = pytest.mark.cpu


def holder(table: Table, rank: int, value: float = 7.0) -> list[torch.nn.Module]:
    """Bare modules with the parameters and buffers of `rank`, all set to `value`."""
    chunks = [torch.nn.Module() for _ in range(table.layout.vpp)]
    for placed in table.placed(rank):
        *path, name = placed.local.split(".")
        module = chunks[placed.chunk]
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        tensor = torch.full(placed.shape, value, dtype=DTYPES[placed.unit.dtype])
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
def table() -> Table:
    return Table(model("glm4_moe", num_hidden_layers=2), Layout.parse("tp=2,pp=2,ep=2,etp=1"))


@pytest.fixture
def tensors(table: Table) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {t.name: torch.randn(t.shape) for t in hf_tensors(table)}


def test_loads_what_the_blocks_say_and_zeroes_the_padding(
    table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "hf", tensors)
    for rank in range(table.layout.world):
        chunks = holder(table, rank)
        load(table, rank, chunks, tmp_path / "hf")
        for placed, tensor in bind(table, rank, chunks):
            covered = torch.zeros(placed.shape, dtype=torch.bool)
            for block in placed.blocks:
                covered[block.local] = True
                expected = tensors[placed.unit.hf[block.source].name][block.remote]
                assert torch.equal(tensor[block.local], expected)
            assert not tensor[~covered].any()


def test_each_file_is_opened_once_and_only_slices_are_read(
    table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    chunks = holder(table, 0)
    load(table, 0, chunks, tmp_path / "hf")
    assert sorted(opened) == sorted((tmp_path / "hf").glob("*.safetensors"))
    held = sum(sum(torch.zeros(p.shape)[b.local].numel() for b in p.blocks) for p, _ in bind(table, 0, chunks))
    assert read == held


def test_fp32_bias_is_a_buffer_and_is_loaded(table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write(tmp_path / "hf", tensors)
    chunks = holder(table, 2)
    load(table, 2, chunks, tmp_path / "hf")
    bias = inventory(chunks)[0, "decoder.layers.0.mlp.router.expert_bias"]
    assert torch.equal(bias, tensors["model.layers.1.mlp.gate.e_score_correction_bias"])


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"not a safetensors file at all")


def _file_lost(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[2].unlink()


def _index_lies(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.ghost.weight"] = next(iter(found["weight_map"].values()))
    index.write_text(json.dumps(found))


def _index_broken(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _no_files(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncate, "not a whole safetensors file"),
        (_garbage, "not a whole safetensors file"),
        (_file_lost, "names files that are not there"),
        (_index_lies, "disagree on 1 tensors, first model.ghost.weight"),
        (_index_broken, "not a safetensors index"),
        (_no_files, "no .*safetensors file"),
    ],
)
def test_bad_folders_are_refused_before_anything_is_written(
    table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path, spoil: Any, says: str
) -> None:
    write(tmp_path / "hf", tensors)
    spoil(tmp_path / "hf")
    chunks = holder(table, 0)
    with pytest.raises(BridgeError, match=says):
        load(table, 0, chunks, tmp_path / "hf")
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
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    changed = {k: v for k, v in (tensors | change).items() if v is not None}
    write(tmp_path / "hf", changed)
    chunks = holder(table, 1)
    with pytest.raises(BridgeError, match=says) as error:
        load(table, 1, chunks, tmp_path / "hf")
    assert "glm4_moe" in str(error.value)
    assert table.layout.text in str(error.value)
    assert all((t == 7).all() for t in inventory(chunks).values())


def test_tensors_that_the_family_ignores_are_counted_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Qwen3-Next's multi-token prediction, which transformers leaves out too; any other surplus is refused."""
    table = Table(model("qwen3_next", num_hidden_layers=1), Layout())
    chunks = holder(table, 0)
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(table)}
    write(tmp_path, {**tensors, "mtp.fc.weight": torch.ones(2, 4), "mtp.norm.weight": torch.ones(2)})
    load(table, 0, chunks, tmp_path)
    assert "qwen3_next: 2 tensors are left out, as the family says: mtp.fc.weight, mtp.norm.weight" in caplog.text
    assert torch.equal(inventory(chunks)[0, "decoder.final_layernorm.weight"], tensors["model.norm.weight"])
    write(tmp_path, {**tensors, "mtp.fc.weight": torch.ones(2, 4), "model.mtp.weight": torch.ones(2)})
    with pytest.raises(BridgeError, match=r"1 tensors belong to no row of the table: model\.mtp\.weight"):
        load(table, 0, chunks, tmp_path)


def test_same_tensor_in_two_files(table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write(tmp_path / "hf", tensors)
    save_file({"model.norm.weight": torch.zeros(24)}, tmp_path / "hf" / "again.safetensors")
    with pytest.raises(BridgeError, match=r"model.norm.weight is already in another file"):
        load(table, 0, holder(table, 0), tmp_path / "hf")


def test_modules_that_differ_from_the_table_are_refused(table: Table) -> None:
    chunks = holder(table, 3)
    chunks[0].register_parameter("adapter", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(BridgeError, match=r"rank 3 \(tp1 .*in no row of the table: chunk 0 adapter"):
        bind(table, 3, chunks)
    del chunks[0].adapter
    layer = chunks[0].decoder.layers  # type: ignore[union-attr]
    norm = getattr(layer, "0").input_layernorm
    norm.weight = torch.nn.Parameter(torch.zeros(24, dtype=torch.bfloat16))
    with pytest.raises(BridgeError, match=r"the table says .* float32"):
        bind(table, 3, chunks)
    del norm.weight
    with pytest.raises(BridgeError, match=r"has no decoder.layers.0.input_layernorm.weight"):
        bind(table, 3, chunks)


def test_an_alias_that_differs_is_refused(tmp_path: Path) -> None:
    table = Table(model("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1), Layout.parse("tp=2"))
    tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(table)}
    for original, alias in (("model.embed_tokens", "embed_tokens"), ("lm_head", "shared_head.head")):
        tensors[f"model.layers.2.{alias}.weight"] = tensors[f"{original}.weight"].clone()
    write(tmp_path / "good", tensors)
    chunks = holder(table, 1)
    load(table, 1, chunks, tmp_path / "good")
    rows = inventory(chunks)[0, "output_layer.weight"]
    assert torch.equal(rows[:3], tensors["lm_head.weight"][128:])
    tensors["model.layers.2.shared_head.head.weight"][130, 5] += 1
    write(tmp_path / "bad", tensors)
    with pytest.raises(BridgeError, match=r"model.layers.2.shared_head.head.weight differs from lm_head.weight"):
        load(table, 1, chunks, tmp_path / "bad")


def test_a_buffer_that_follows_from_the_config_is_left_out(
    table: Table, tensors: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "hf", {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(table, 0, holder(table, 0), tmp_path / "hf")
    assert "1 tensors are left out" in caplog.text
