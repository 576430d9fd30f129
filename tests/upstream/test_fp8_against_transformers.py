"""Files in FP8 blocks: what loading makes of them, bit for bit what transformers' own dequantisation makes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moeref.bridge import BridgeError, Checkpoint, ShardMap, hf_tensors, inventory, load
from moeref.bridge.fp8_blocks import dequantised
from moeref.exporter.quantise import quantise
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder, write

pytestmark = pytest.mark.cpu

BLOCK = (4, 6)
QUANTISED = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}}
LAYERS = {"num_hidden_layers": 3}
NAME = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def by_transformers(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """It takes whole blocks alone: weights with others are padded for it."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers 4 has other modules")
    if not hasattr(fp8, "Fp8Dequantize") or not hasattr(fp8.Fp8Dequantize, "_dequantize_one"):
        pytest.skip("transformers before 5.12 has it in another form")
    whole = torch.zeros([n * of for n, of in zip(scales.shape, BLOCK, strict=True)]).to(torch.float8_e4m3fn)
    whole[: len(weight), : weight.shape[1]] = weight
    found: torch.Tensor = fp8.Fp8Dequantize(None)._dequantize_one(whole, scales, torch.bfloat16)
    return found[: len(weight), : weight.shape[1]].contiguous()


def quantised(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of every size that FP8 has, and a scale for each block, the last of them smaller."""
    weight = (torch.randn(rows, columns) * 10 ** torch.randint(-3, 3, (rows, columns))).to(torch.float8_e4m3fn)
    return weight, torch.rand([-(-n // of) for n, of in zip((rows, columns), BLOCK, strict=True)]) * 1e-3


@pytest.mark.parametrize("shape", [(8, 12), (4, 6), (10, 13), (1, 1)])
def test_every_part_of_a_tensor(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, scales = quantised(*shape)
    whole = by_transformers(weight, scales)

    def part(tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda rows, columns: tensor[rows, columns]

    for first in range(shape[0]):
        for left in range(0, shape[1], 5):
            for last in range(first + 1, shape[0] + 1):
                found = dequantised(part(weight), part(scales), range(first, last), range(left, shape[1]), BLOCK)
                assert torch.equal(found.view(torch.int16), whole[first:last, left:].view(torch.int16))


@pytest.mark.parametrize("shape", [(8, 12), (10, 13), (1, 1), (40, 66)])
def test_what_is_sent_is_read_by_transformers_as_it_was(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).bfloat16()
    back = by_transformers(*quantise(NAME, tensor, BLOCK)).float()
    # Half a step of e4m3, or of the smallest numbers of the largest block, and of the bf16 that it is read in.
    limit = (tensor.float().abs() / 16).clamp_min(float(tensor.abs().max()) / 448 / 1024) * (1 + 2.0**-4)
    assert ((back - tensor.float()).abs() <= limit).all()


def test_what_is_sent_is_what_transformers_writes() -> None:
    """It multiplies by the inverse of a scale, which may round otherwise."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers 4 has other modules")
    if not hasattr(fp8, "Fp8Quantize") or not hasattr(fp8.Fp8Quantize, "_quantize_one"):
        pytest.skip("transformers before 5.12 has it in another form")
    torch.manual_seed(0)
    tensor = torch.randn(64, 60).bfloat16()
    tensor[:4, :6] = 0
    asked = SimpleNamespace(weight_block_size=BLOCK, scale_fmt="float")
    theirs = fp8.Fp8Quantize(SimpleNamespace(quantization_config=asked))._quantize_one(NAME, tensor)
    weight, scales = quantise(NAME, tensor, BLOCK)
    torch.testing.assert_close(scales, theirs[f"{NAME}_scale_inv"], rtol=1e-6, atol=0)
    assert (weight.view(torch.uint8) != theirs[NAME].view(torch.uint8)).float().mean() < 0.01


def files(shard_map: ShardMap) -> tuple[Tensors, Tensors]:
    """The linears of a checkpoint in FP8 with the rest as bf16, and all of it as transformers turns it into bf16."""
    torch.manual_seed(0)
    held: Tensors = {}
    plain: Tensors = {}
    linears = ("_proj.weight", ".indexer.wq_b.weight", ".indexer.wk.weight")
    for tensor in hf_tensors(shard_map):
        if tensor.name.endswith(linears) and not tensor.name.endswith(".indexer.weights_proj.weight"):
            held[tensor.name], held[f"{tensor.name}_scale_inv"] = quantised(*tensor.shape)
            plain[tensor.name] = by_transformers(held[tensor.name], held[f"{tensor.name}_scale_inv"])
        else:
            held[tensor.name] = plain[tensor.name] = torch.randn(tensor.shape).to(getattr(torch, tensor.dtype))
    return held, plain


@pytest.mark.parametrize("layout", ["tp=1", "tp=2,pp=3,ep=2,etp=1", "ep=2,etp=2"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "qwen3_moe"])
def test_a_rank_loads_what_it_loads_of_the_files_in_bf16(family: str, layout: str, tmp_path: Path) -> None:
    shard_map = ShardMap(model(family, **LAYERS, **QUANTISED, dtype="bfloat16"), Layout.parse(layout))
    held, plain = files(shard_map)
    write(tmp_path / "fp8", held)
    write(tmp_path / "bf16", plain)
    for rank in range(shard_map.layout.world):
        loaded, expected = holder(shard_map, rank), holder(shard_map, rank, 5.0)
        load(shard_map, rank, loaded, tmp_path / "fp8")
        load(shard_map, rank, expected, tmp_path / "bf16")
        found = inventory(loaded)
        assert all(torch.equal(found[name], tensor) for name, tensor in inventory(expected).items())


class Widest(TorchDispatchMode):
    """The most elements that a fp32 tensor has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_a_row_of_blocks_at_a_time_is_fp32() -> None:
    weight, scales = quantised(400, 60)
    with Widest() as widest:
        dequantised(lambda *of: weight[of], lambda *of: scales[of], range(400), range(60), BLOCK)
    assert widest.elements == max(scales.numel(), BLOCK[0] * 60)


def test_only_the_scales_of_a_part_are_read() -> None:
    weight, scales = quantised(16, 24)
    read: list[tuple[slice, slice]] = []

    def part(*of: slice) -> torch.Tensor:
        read.append((of[0], of[1]))
        return scales[of]

    dequantised(lambda *of: weight[of], part, range(5, 11), range(7, 13), BLOCK)
    assert read == [(slice(1, 3), slice(1, 3))]


def test_a_weight_that_is_no_matrix_is_refused_by_name(tmp_path: Path) -> None:
    weight, scales = quantised(4, 6)
    write(tmp_path, {NAME: weight[None], f"{NAME}_scale_inv": scales})
    with pytest.raises(BridgeError, match=rf"{NAME} is F8_E4M3 \[1, 4, 6\]; in blocks of 4 × 6 "):
        Checkpoint(tmp_path, BLOCK)


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        (None, rf"{NAME}_scale_inv has to be \[\d+, \d+\] F32, and there is no such tensor"),
        (torch.ones(2, 2), rf"{NAME}_scale_inv has to be \[\d+, \d+\] F32, and it is \[2, 2\] F32"),
        (torch.ones(1, dtype=torch.int32), r"and it is \[1\] I32"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(scales: torch.Tensor | None, says: str, tmp_path: Path) -> None:
    shard_map = ShardMap(model("deepseek_v3", **LAYERS, **QUANTISED, dtype="bfloat16"), Layout())
    held, _ = files(shard_map)
    del held[f"{NAME}_scale_inv"]
    write(tmp_path, held if scales is None else {**held, f"{NAME}_scale_inv": scales})
    with pytest.raises(BridgeError, match=f"{NAME} is F8_E4M3 .* in blocks of 4 × 6 .*{says}"):
        load(shard_map, 0, holder(shard_map, 0), tmp_path)


def test_a_whole_tensor_is_read_too(tmp_path: Path) -> None:
    shard_map = ShardMap(model("qwen3_moe", **LAYERS, **QUANTISED, dtype="bfloat16"), Layout())
    held, plain = files(shard_map)
    write(tmp_path, held)
    with Checkpoint(tmp_path, BLOCK) as checkpoint:
        assert {name for name, _ in checkpoint.tensors()} == checkpoint.names == set(plain)
        assert all(torch.equal(tensor, plain[name]) for name, tensor in checkpoint.tensors())


def test_router_biases_in_bf16_become_fp32_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard_map = ShardMap(model("deepseek_v3", **LAYERS, dtype="bfloat16"), Layout())
    tensors = {t.name: torch.randn(t.shape).bfloat16() for t in hf_tensors(shard_map)}
    write(tmp_path, tensors)
    chunks = holder(shard_map, 0)
    with caplog.at_level(logging.WARNING):
        load(shard_map, 0, chunks, tmp_path)
    bias = inventory(chunks)[0, "decoder.layers.2.mlp.router.expert_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors["model.layers.2.mlp.gate.e_score_correction_bias"].float())
    assert "1 router biases are bfloat16 in the file and become float32" in caplog.text
