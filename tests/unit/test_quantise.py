"""Sending FP8 in blocks: what is quantised, scales, refusals, buckets, and files that moeref's reader takes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moeref.bridge import Checkpoint, HFTensor, ShardMap, inventory
from moeref.exporter import ExportError, Plan, buckets, export, quantised, read, unit_of
from moeref.exporter.quantise import BAND, quantise
from moeref.families import FamilyError, UnmappedModelError
from moeref.layout import Layout
from tests.unit.models import CONFIGS, model
from tests.unit.test_loader import holder, write

pytestmark = pytest.mark.cpu
BLOCK = (4, 6)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
CONFIG = {"model_type": "deepseek_v3", "quantization_config": FP8}
NAME = "model.layers.3.mlp.experts.7.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def sent(tensors: Tensors, **asked: Any) -> dict[str, torch.Tensor | None]:
    return dict(quantised(tensors.items(), {**CONFIG, "quantization_config": {**FP8, **asked}}))


def spread(scales: torch.Tensor, like: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: like.shape[0], : like.shape[1]]


@pytest.mark.parametrize("shape", [(8, 12), (1, 1), (5, 6), (4, 7), (9, 13), (3 * BAND // 8, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_block_has_the_scale_of_its_largest_and_every_element_its_nearest(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 2.0 ** torch.randint(-8, 8, shape)).to(dtype)
    weight, scales = quantise(NAME, tensor, BLOCK)
    assert (weight.dtype, weight.shape, weight.is_contiguous()) == (torch.float8_e4m3fn, tensor.shape, True)
    rows = [list(torch.split(row, BLOCK[1], 1)) for row in torch.split(tensor.float(), BLOCK[0])][:5]
    largest = torch.tensor([[float(part.abs().max()) for part in row] for row in rows])
    assert torch.equal(scales[:5], largest / 448)
    quotients = tensor.float() / spread(scales, tensor)
    assert torch.equal(weight.view(torch.uint8), quotients.to(torch.float8_e4m3fn).view(torch.uint8))


def test_blocks_of_zeros_have_a_scale_of_one_and_the_smallest_weights_one_that_divides() -> None:
    tensor = torch.zeros(8, 6, dtype=torch.bfloat16)
    tensor[4:] = torch.tensor(1, dtype=torch.int16).view(torch.bfloat16)  # the smallest number of bf16
    weight, scales = quantise(NAME, tensor, BLOCK)
    assert weight[:4].float().count_nonzero() == 0
    assert (scales[0, 0], weight[4, 0].float()) == (1.0, 448.0)
    assert 0 < scales[1, 0] < tensor[4, 0]


@pytest.mark.parametrize("power", [False, True])
def test_what_has_a_scale_of_zero_becomes_zero(power: bool) -> None:
    tensor = torch.zeros(4, 6)
    tensor[0, 0] = 1e-44
    weight, scales = quantise(NAME, tensor, BLOCK, power)
    assert (weight.float().count_nonzero(), scales.unique().tolist()) == (0, [1.0])


def test_parameters_leave_no_graph_of_what_was_quantised() -> None:
    weight, scales = quantise(NAME, torch.nn.Parameter(torch.randn(8, 6)), BLOCK)
    assert not weight.requires_grad
    assert not scales.requires_grad


def test_powers_of_two_are_no_smaller_than_the_scales_and_less_than_twice() -> None:
    tensor = torch.randn(40, 60)
    tensor[:4, :6] = 448 * 0.25  # whose scale is a power of two
    plain, powers = (quantise(NAME, tensor, BLOCK, power)[1] for power in (False, True))
    assert powers[0, 0] == plain[0, 0] == 0.25
    assert (powers.frexp().mantissa == 0.5).all()
    assert ((plain <= powers) & (powers < 2 * plain)).all()
    assert torch.equal(sent({NAME: tensor}, scale_fmt="ue8m0")[f"{NAME}_scale_inv"], powers)  # type: ignore[arg-type]


def test_a_strided_view_is_read_as_it_is() -> None:
    tensor = torch.randn(13, 9).bfloat16()
    for got, want in zip(
        quantise(NAME, tensor.t(), BLOCK), quantise(NAME, tensor.t().contiguous(), BLOCK), strict=True
    ):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_has_no_scale_is_refused_by_name(value: float) -> None:
    tensor = torch.randn(9, 13)
    tensor[8, 12] = value
    with pytest.raises(ExportError, match=rf"^{NAME} holds inf or NaN"):
        sent({NAME: tensor})


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.ones(2, 4, 6), torch.ones(4, 6).to(torch.float8_e4m3fn)])
def test_what_is_no_matrix_of_weights_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ExportError, match=rf"^{NAME} is torch\.float.* \[.*\]; only matrices of bf16, fp16 or fp32"):
        sent({NAME: tensor})


@pytest.mark.parametrize(
    "name",
    [
        *("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
        *(f"model.layers.3.{part}.weight" for part in ("input_layernorm", "mlp.gate", "eh_proj", "shared_head.head")),
        *(
            f"model.layers.3.self_attn.{part}"
            for part in ("q_norm.weight", "q_proj.bias", "indexer.weights_proj.weight")
        ),
        *("model.layers.3.mlp.gate.e_score_correction_bias", "model.layers.3.linear_attn.conv1d.weight"),
        *("model.layers.3.linear_attn.A_log", "model.layers.3.mlp.shared_expert_gate.weight"),
    ],
)
def test_what_stays_is_passed_on(name: str) -> None:
    tensor = torch.ones(4, 6)
    assert sent({name: tensor}) == {name: tensor}
    assert sent({name: tensor})[name] is tensor


@pytest.mark.parametrize(
    ("listed", "stays"),
    [
        ("model.layers.3.mlp.experts.7.up_proj", True),
        ("model.layers.3", True),
        ("mlp.experts.7.up_proj", True),
        ("up_proj", True),
        ("model.layers.3.mlp.experts.7.up", False),
        ("layers.3.mlp", False),
        ("model.layers.3.mlp.experts.71", False),
        ("proj", False),
    ],
)
def test_a_module_is_kept_by_its_name_or_the_end_of_it(listed: str, stays: bool) -> None:
    tensor = torch.randn(4, 6)
    for key in ("modules_to_not_convert", "ignored_layers"):
        assert (sent({NAME: tensor}, **{key: ["lm_head", listed]}).keys() == {NAME}) == stays


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", "export them per_expert"),
        ("model.layers.3.mixer.kernel.weight", "add it to modules_to_not_convert"),
    ],
)
def test_weights_of_unknown_kind_are_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(UnmappedModelError, match=f"^{name}.*{says}"):
        sent({name: torch.ones(4, 6)})


@pytest.mark.parametrize(
    "change", [{"quant_method": "mxfp4"}, {"fmt": "e5m2"}, {"weight_block_size": None}, {"activation_scheme": "static"}]
)
def test_other_formats_are_refused_before_a_tensor_is_asked_for(change: dict[str, Any]) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("asked for a tensor")
        yield

    with pytest.raises(UnmappedModelError, match=r"^deepseek_v3: the config asks for .*; only FP8 \(e4m3\) in blocks"):
        quantised(stream(), {**CONFIG, "quantization_config": {**FP8, **change}})
    with pytest.raises(UnmappedModelError, match="asks for None"):
        quantised(stream(), {"model_type": "deepseek_v3"})
    with pytest.raises(FamilyError, match="cannot read"):
        quantised(stream(), "no/such/folder")


def test_ranks_that_receive_nothing_have_the_same_names() -> None:
    names = [NAME, "model.norm.weight"]
    given = [name for name, _ in quantised(((name, torch.ones(4, 6)) for name in names), CONFIG)]
    others = list(quantised(((HFTensor(name, (4, 6), "bfloat16"), None) for name in names), CONFIG))
    assert others == [(name, None) for name in given]


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "qwen3_moe", "glm4_moe", "qwen3_next"])
def test_buckets_keep_weights_with_their_scales_and_files_are_read_back(family: str, tmp_path: Path) -> None:
    plan = Plan(ShardMap(model(family, num_hidden_layers=3, dtype="bfloat16"), Layout()))
    chunks = holder(plan.shard_map, 0)
    torch.manual_seed(0)
    for tensor in inventory(chunks).values():
        tensor.copy_(torch.randn(tensor.shape))
    config = {**CONFIGS[family], "quantization_config": {**FP8, "modules_to_not_convert": ["in_proj_ba"]}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    plain = {tensor.name: full for tensor, full in export(plan, 0, chunks) if full is not None}
    held: Tensors = {}
    with export(plan, 0, chunks) as stream:
        for bucket in buckets(quantised(stream, path), 4096, lend=True):
            found = dict(read(bucket.message()).tensors())
            quantised_here = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
            assert {f"{name}_scale_inv" for name in quantised_here} == {name for name in found if "_scale_" in name}
            held |= {name: tensor.clone() for name, tensor in found.items()}
            del found
    write(tmp_path / "fp8", held)
    with Checkpoint(tmp_path / "fp8", BLOCK) as checkpoint:
        back = dict(checkpoint.tensors())
    assert back.keys() == plain.keys()
    for name, tensor in plain.items():
        scales = held.get(f"{name}_scale_inv")
        if scales is None:
            assert torch.equal(back[name], tensor)
        else:
            step = spread(scales, tensor) * 2.0**-9  # and half a step of bf16, in which it is read
            assert ((back[name].float() - tensor.float()).abs() <= (tensor.float().abs() / 16).max(step) * 1.1).all()


def test_scales_are_of_the_unit_of_their_weight() -> None:
    for name in (NAME, "model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.x_proj.weight", "lm_head.weight"):
        assert unit_of(f"{name}_scale_inv") == unit_of(name)


class Largest(TorchDispatchMode):
    """The most bytes that a tensor has."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_a_band_at_a_time_is_fp32() -> None:
    tensor = torch.randn(4 * BAND // 64, 64).bfloat16()
    with Largest() as largest:
        quantise(NAME, tensor, (16, 16))
    assert largest.nbytes == tensor.numel() == 4 * BAND
