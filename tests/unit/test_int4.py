"""INT4 as compressed-tensors packs it: numbers by number, read in slices, sent again, and other forms refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeref import families
from moeref.bridge import BridgeError, ShardMap, load
from moeref.bridge.checkpoint import Checkpoint
from moeref.bridge.int4_groups import unpacked
from moeref.exporter import Plan, export, quantised
from moeref.exporter.plan import ExportError
from moeref.exporter.quantise import pack
from moeref.families import UnmappedModelError
from moeref.families.quantised import INT4Groups, read_int4_groups
from moeref.layout import Layout
from tests.unit.models import CONFIGS
from tests.unit.test_loader import holder

pytestmark = pytest.mark.cpu
#: As Kimi-K2.5's config has it, with smaller groups.
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 8,
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
CONFIG = {**CONFIGS["kimi_k25"], "dtype": "bfloat16", "quantization_config": INT4}
NAME = "model.layers.1.mlp.experts.0.up_proj.weight"


def number_by_number(words: torch.Tensor, scales: torch.Tensor, columns: int, group: int) -> torch.Tensor:
    made = torch.empty(len(words), columns, dtype=torch.bfloat16)
    for row in range(len(words)):
        for column in range(columns):
            word = int(words[row, column // 8]) % 2**32
            number = word // 16 ** (column % 8) % 16 - 8
            made[row, column] = number * float(scales[row, column // group])
    return made


@pytest.mark.parametrize(("columns", "group"), [(64, 32), (40, 8), (24, 16), (26, 8), (13, 4)])
def test_what_is_packed_is_read_again_within_half_a_number(columns: int, group: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, columns).bfloat16() * torch.tensor([1.0, 64.0, 2.0**-9] * 2)[:, None].bfloat16()
    weight[2, :group] = 0
    words, scales, shape = pack(NAME, weight, group)
    assert (words.dtype, list(words.shape)) == (torch.int32, [6, -(-columns // 8)])
    assert (scales.dtype, list(scales.shape)) == (torch.bfloat16, [6, -(-columns // group)])
    assert (shape.dtype, shape.tolist()) == (torch.int32, [6, columns])
    want = number_by_number(words, scales, columns, group)
    half = scales.float().repeat_interleave(group, 1)[:, :columns] * 0.52
    assert bool(((want - weight).float().abs() <= half).all())
    assert torch.equal(want[2, :group], weight[2, :group])
    parts = {NAME + end: of for end, of in zip(("_packed", "_scale", "_shape"), (words, scales, shape), strict=True)}
    save_file(parts, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, group=group) as checkpoint:
        assert checkpoint.names == {NAME}
        assert checkpoint.header(NAME) == (NAME, (6, columns), "bfloat16")
        assert torch.equal(dict(checkpoint.tensors())[NAME], want)
        for first, last in ((0, columns), (5, 11), (9, 13)):
            rows, across = slice(1, 4), slice(first, last)
            assert torch.equal(checkpoint.read(NAME, (rows, across)), want[rows, across])


def test_numbers_of_files_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    numbers = torch.randint(-7, 8, (64, 32))
    numbers[:, 5] = 7
    scales = (0.01 + torch.rand(64, 1)).bfloat16()
    weight = (numbers * scales.float()).bfloat16()
    words, again, _ = pack(NAME, weight, 32)
    found = torch.tensor([[int(word) % 2**32 // 16**at % 16 - 8 for word in row for at in range(8)] for row in words])
    assert torch.equal(found, numbers)
    assert bool(((again.float() / scales.float() - 1).abs() <= 2.0**-7).all())


def checkpoint_of(folder: Path, **changes: Any) -> tuple[ShardMap, list[torch.nn.Module], dict[str, torch.Tensor]]:
    """A small model's INT4 files, as `quantised` sends them, an empty model to load them, and what was sent."""
    source = ShardMap(families.read({**CONFIG, "quantization_config": None}), Layout())
    chunks = holder(source, 0)
    torch.manual_seed(1)
    for tensor in chunks[0].state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    sent = {name: of for name, of in quantised(export(Plan(source), 0, chunks), CONFIG) if of is not None}
    files = {name: of.clone().contiguous() for name, of in sent.items()} | changes
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    target = ShardMap(families.read(CONFIG), Layout())
    return target, holder(target, 0), sent


def test_experts_alone_are_packed_and_load_again(tmp_path: Path) -> None:
    target, chunks, sent = checkpoint_of(tmp_path, **{"vision_tower.proj.weight": torch.ones(2)})
    packed = {name.removesuffix("_packed") for name in sent if name.endswith("_packed")}
    assert len(packed) == 3 * 3 * 16
    assert all(".mlp.experts." in name for name in packed)
    assert {name.rpartition(".")[2] for name in sent} >= {"weight_packed", "weight_scale", "weight_shape"}
    load(target, 0, chunks, tmp_path)
    again = {tensor.name: full.clone() for tensor, full in export(Plan(target), 0, chunks)}
    for name in again:
        columns = [] if name not in packed else sent[f"{name}_shape"].tolist()[1:]
        want = number_by_number(sent[f"{name}_packed"], sent[f"{name}_scale"], *columns, 8) if columns else sent[name]
        assert torch.equal(again[name], want), name


@pytest.mark.parametrize(
    ("end", "value", "says"),
    [
        (
            "_scale",
            torch.ones(56, 2).bfloat16(),
            r"scale \[56, 3\] BF16, and they are .*\[56, 2, 'BF16'\]",
        ),
        ("_scale", torch.ones(56, 3), r"they are .*\[56, 3, 'F32'\]"),
        (
            "_shape",
            torch.tensor([56, 32], dtype=torch.int32),
            r"is \[56, 32\], for which .*_packed has to be \[56, 4\]",
        ),
        ("_shape", torch.tensor([56], dtype=torch.int32), r"_shape is \[1\], for which"),
        ("_packed", torch.zeros(56, 3, dtype=torch.int64), r"they are \[56, 3, 'I64'\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(end: str, value: torch.Tensor, says: str, tmp_path: Path) -> None:
    name = f"language_model.{NAME}"
    target, chunks, _ = checkpoint_of(tmp_path, **{name + end: value})
    with pytest.raises(BridgeError, match=says) as refused:
        load(target, 0, chunks, tmp_path)
    assert str(refused.value).startswith(f"{name} is INT4 in groups of 8: ")


def with_(path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(INT4)
    at, keys = made, path.split("/")
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return made


_WEIGHTS = "config_groups/group_0/weights"


@pytest.mark.parametrize(
    "other",
    [
        with_(f"{_WEIGHTS}/num_bits", 8),
        with_(f"{_WEIGHTS}/type", "float"),
        with_(f"{_WEIGHTS}/symmetric", False),
        with_(f"{_WEIGHTS}/strategy", "channel"),
        with_(f"{_WEIGHTS}/group_size", None),
        with_(f"{_WEIGHTS}/group_size", 0),
        with_(f"{_WEIGHTS}/actorder", "group"),
        with_(f"{_WEIGHTS}/dynamic", True),
        with_(f"{_WEIGHTS}/scale_dtype", "torch.uint8"),
        with_("config_groups/group_0/input_activations", {"num_bits": 8}),
        with_("config_groups/group_0/targets", ["re:.*experts.*"]),
        with_("config_groups/group_1", {}),
        with_("config_groups", None),
        with_("kv_cache_scheme", {"num_bits": 8}),
        with_("format", "mxfp4-pack-quantized"),
        with_("quant_method", "gptq"),
    ],
)
def test_other_forms_are_refused_by_name(other: dict[str, Any]) -> None:
    config = {**CONFIG, "quantization_config": other}
    with pytest.raises(UnmappedModelError, match=r"^kimi_k25: the checkpoint is quantised .(compressed|gptq)"):
        families.read(config)
    with pytest.raises(UnmappedModelError, match=r"^kimi_k25: the config asks for (compressed-tensors|gptq) "):
        quantised(iter(()), config)


def test_a_config_in_int4_is_read() -> None:
    plain = families.read({**CONFIG, "quantization_config": None})
    assert families.read(CONFIG) == replace(plain, int4_group=8)
    inside = {**CONFIG, "quantization_config": None}
    inside["text_config"] = {**CONFIG["text_config"], "quantization_config": INT4}
    del inside["quantization_config"]
    assert families.read(inside) == families.read(CONFIG)
    assert [*quantised(iter(()), inside)] == []
    assert read_int4_groups({"quantization_config": INT4}) == INT4Groups(8, tuple(INT4["ignore"]))


def test_what_is_no_linear_of_files_is_refused_by_name() -> None:
    groups = INT4Groups(8, tuple(INT4["ignore"]))
    kept = ("mlp.gate.weight", "input_layernorm.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight")
    assert not any(groups.quantises(f"language_model.model.layers.0.{name}") for name in kept)
    assert not groups.quantises("language_model.lm_head.weight")
    assert groups.quantises(f"language_model.{NAME}")
    for name in ("mlp.mixer.weight", "mlp.experts.gate_up_proj"):
        with pytest.raises(UnmappedModelError, match=f"^model.layers.1.{name}: not known as a linear that INT4"):
            groups.quantises(f"model.layers.1.{name}")


def test_what_has_no_scale_is_refused() -> None:
    with pytest.raises(ExportError, match=f"{NAME} holds inf or NaN"):
        pack(NAME, torch.tensor([[1.0, torch.inf]]), 2)
    with pytest.raises(ExportError, match="only matrices"):
        pack(NAME, torch.ones(3), 2)


def test_what_has_a_scale_of_zero_becomes_zero() -> None:
    words, scales, _ = pack(NAME, torch.nn.Parameter(torch.tensor([[1e-44, *[0.0] * 7]])), 8)
    assert unpacked(words).tolist() == [[0] * 8]
    assert scales.tolist() == [[1.0]]
    assert not scales.requires_grad
