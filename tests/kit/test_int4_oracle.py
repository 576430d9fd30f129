"""INT4 in the oracle: bits of a word, what a checkpoint holds, and what a model loads of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.requests import int4 as request
from moeref_conformance.contract.requests.int4 import PACKED, SCALE, SHAPE
from moeref_conformance.diagnosis import values
from moeref_conformance.oracles import int4
from moeref_conformance.oracles.checkpoint import INDEX, expected
from moeref_conformance.oracles.expected import read_checkpoint
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu
KIMI = cell("kimi_k25", "one", layers=2, dtype="bfloat16", int4_checkpoint=True)
EXPERT = "language_model.model.layers.1.mlp.experts.3.down_proj.weight"


def test_the_first_number_is_in_the_lowest_bits_and_8_more_than_it_is() -> None:
    assert int4.word([-7, -8, -8, -8, -8, -8, -8, -8]) == 1
    assert int4.word([-8, -7]) == 16
    assert int4.word([7] * 8) == -1
    assert int4.numbers_of([0x76543210, -1], 11) == [-8, -7, -6, -5, -4, -3, -2, -1, 7, 7, 7]
    numbers = torch.arange(-8, 5).expand(2, -1)
    words = int4.packed(numbers)
    assert (words.dtype, list(words.shape)) == (torch.int32, [2, 2])
    assert [int4.numbers_of(row, 13) for row in words.tolist()] == numbers.tolist()


def test_experts_alone_have_three_tensors_and_load_as_one(tmp_path: Path) -> None:
    made = expected(KIMI, tmp_path)
    files = read_checkpoint(made.dir / "checkpoint")
    packed = {name.removesuffix(PACKED) for name in files if name.endswith(PACKED)}
    assert {name for name in made.tensors if ".mlp.experts." in name} == packed
    words, scales, shape = (files[EXPERT + end] for end in (PACKED, SCALE, SHAPE))
    assert (list(words.shape), list(scales.shape), shape.tolist()) == ([40, 7], [40, 7], [40, 56])
    assert (scales.dtype, shape.dtype) == (torch.bfloat16, torch.int32)
    number = ((int(words[2, 3]) >> 20) & 15) - 8  # column 29 is number 5 of word 3, in group 3
    assert float(made.tensors[EXPERT][2, 29]) == float((number * scales[2, 3].float()).bfloat16())
    places = json.loads((made.dir / "checkpoint" / INDEX).read_text())["weight_map"]
    assert all(places[name + SCALE] != places[name + PACKED] for name in packed)
    assert made.missing.removesuffix(SCALE) in packed
    assert made.unlike.endswith(SCALE)
    assert made.config["quantization_config"]["format"] == "pack-quantized"
    numbers = torch.tensor([int4.numbers_of(row, 56) for row in words.tolist()])
    assert {-8, 0, 7} <= set(numbers.flatten().tolist())


@pytest.mark.parametrize("more", [{"dtype": "float32"}, {"family": "qwen3_moe"}, {"fp8_checkpoint": True}])
def test_others_have_no_recipe(more: dict[str, object], tmp_path: Path) -> None:
    given = {"family": "deepseek_v3", "dtype": "bfloat16", "int4_checkpoint": True, **more}
    with pytest.raises(ValueError, match="experts in INT4 have a recipe for deepseek_v3 and kimi_k25 in bf16 alone"):
        expected(cell(str(given.pop("family")), "one", layers=3, **given), tmp_path)


def test_what_scales_of_groups_and_signs_are_told_by() -> None:
    torch.manual_seed(0)
    want = torch.randn(6, 32)
    factors = (0.5 + torch.rand(6, 4)).repeat_interleave(8, 1)
    assert values.scaled_by_run(want, want * factors).endswith("times the expected ones: their scales")
    assert values.scaled_by_block(want, want * factors) == ""
    assert values.scaled_by_run(want, torch.randn(6, 32)) == ""
    assert values.other_signs(want, -want - want.sign()) == "every number has the other sign"
    assert values.other_signs(want, want) == values.other_signs(want, torch.zeros_like(want)) == ""


@pytest.mark.parametrize("divisor", [7.0, 7.5])
def test_numbers_that_are_rounded_once_are_within_the_limit_and_those_cut_off_are_not(divisor: float) -> None:
    """By the largest magnitude of a group / 7, and / 7.5, where the largest becomes 7 all the same."""
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    scales = (int4.largest(weight) / divisor).bfloat16()
    quotients = weight.float() / scales.float().repeat_interleave(8, 1)
    for rounded, fits in ((quotients.round(), True), (quotients.trunc(), False), (quotients.round() + 1, False)):
        made = int4.dequantised(int4.packed(rounded.clamp(-8, 7).long()), scales, weight.shape)
        assert bool(((made - weight.float()).abs() <= int4.limits(weight)).all()) == fits


def test_the_config_of_a_text_model_beside_a_vision_model_says_it_inside() -> None:
    made = request.config({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}})
    assert "quantization_config" not in made
    assert made["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 8
