"""MXFP4 in the oracle: bits of a byte, what a checkpoint holds, and what a model loads of it, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.requests.mxfp4 import BLOCKS, SCALES
from moeref_conformance.diagnosis import shards, values
from moeref_conformance.diagnosis.matching import Candidates
from moeref_conformance.oracles import mxfp4
from moeref_conformance.oracles.checkpoint import INDEX, expected
from moeref_conformance.oracles.expected import read_checkpoint
from moeref_conformance.selftest.faults.base import cell
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

pytestmark = pytest.mark.cpu
OSS = cell("gpt_oss", "one", layers=2, dtype="bfloat16", mxfp4_checkpoint=True)
DOWN = "model.layers.1.mlp.experts.down_proj"


def test_four_bits_are_a_sign_an_exponent_and_a_mantissa() -> None:
    assert [mxfp4.number(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [mxfp4.number(code) for code in range(9, 16)] == [-0.5, -1, -1.5, -2, -3, -4, -6]
    quotients = torch.tensor([0.0, -0.2, 0.3, -0.7, 1.3, 2.4, -2.6, 5.2, -99.0])
    assert mxfp4.nearest(quotients).tolist() == [0, 0, 1, 9, 3, 4, 13, 7, 15]
    assert mxfp4.packed(torch.tensor([1, 0, 0, 1, 15, 9])).tolist() == [1, 16, 159]


def test_every_number_and_scale_is_what_transformers_makes_of_it() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16)).to(torch.uint8)
    blocks[:, :, :, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    scales = torch.randint(90, 165, (2, 6, 3)).to(torch.uint8)
    made = mxfp4.dequantised(blocks, scales)
    assert (list(made.shape), made.dtype) == ([2, 96, 6], torch.bfloat16)
    assert torch.equal(made, convert_moe_packed_tensors(blocks, scales))


def test_experts_alone_have_blocks_and_scales_and_load_as_in_bf16(tmp_path: Path) -> None:
    made = expected(OSS, tmp_path)
    files = read_checkpoint(made.dir / "checkpoint")
    packed = {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
    assert packed == {f"model.layers.{n}.mlp.experts.{of}_proj" for n in (0, 1) for of in ("gate_up", "down")}
    blocks, scales = files[DOWN + BLOCKS], files[DOWN + SCALES]
    assert (list(blocks.shape), list(scales.shape)) == ([12, 96, 3, 16], [12, 96, 3])
    assert (blocks.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    code = int(blocks[5, 7, 2, 3]) >> 4  # input 71 is the second of byte 3 of block 2
    assert float(made.tensors[DOWN][5, 71, 7]) == mxfp4.number(code) * 2.0 ** (int(scales[5, 7, 2]) - 127)
    codes = torch.stack([blocks & 15, blocks >> 4])
    assert set(codes.flatten().tolist()) == set(range(16)) - {8}
    assert set(scales.flatten().tolist()) == {121, 122, 123, 124}
    places = json.loads((made.dir / "checkpoint" / INDEX).read_text())["weight_map"]
    assert all(places[name + SCALES] != places[name + BLOCKS] for name in packed)
    assert made.missing in (DOWN + SCALES, DOWN + BLOCKS)
    assert made.unlike == DOWN + SCALES


def test_transformers_loads_the_files_as_the_oracle_says(tmp_path: Path) -> None:
    made = expected(OSS, tmp_path)
    how = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(made.dir / "checkpoint", dtype=torch.bfloat16, quantization_config=how)
    held = model.state_dict()
    assert held.keys() == made.tensors.keys()
    assert [name for name, of in made.tensors.items() if not torch.equal(held[name], of)] == []


def test_what_an_expert_of_few_numbers_is_told_by() -> None:
    """Many of its elements are equal, and its place in the file is told by the ways that it may be held."""
    torch.manual_seed(0)
    experts = torch.randint(-6, 7, (4, 16, 8)).float()
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda own: own,
        lambda own: own.T.contiguous(),
        lambda own: torch.cat([own.T[0::2], own.T[1::2]]),
    ]
    everything = Candidates({"e": experts})
    for held in ways:
        local = Candidates({"x": held(experts[1])}, behind=everything, parts={"x": ["e"]})
        said = shards.wrong_expert("x", held(experts[1]), held(experts[3]), local)
        assert said == "holds expert 3, expected expert 1"
        assert shards.wrong_expert("x", held(experts[1]), torch.zeros_like(held(experts[1])), local) == ""


def test_what_scales_along_a_column_are_told_by() -> None:
    torch.manual_seed(0)
    want = torch.randn(32, 6)
    factors = (0.5 + torch.rand(4, 6)).repeat_interleave(8, 0)
    assert values.scaled_by_run(want, want * factors).startswith("runs of its columns are ")
    assert values.scaled_by_run(want.T, (want * factors).T).startswith("runs of its rows are ")
    assert values.scaled_by_run(want, torch.randn(32, 6)) == ""


@pytest.mark.parametrize("more", [{"dtype": "float32"}, {"family": "qwen3_moe"}, {"int4_checkpoint": True}])
def test_others_have_no_recipe(more: dict[str, object], tmp_path: Path) -> None:
    given = {"family": "gpt_oss", "dtype": "bfloat16", "mxfp4_checkpoint": True, **more}
    with pytest.raises(ValueError, match="experts in MXFP4 have a recipe for gpt_oss in bf16, without replay"):
        expected(cell(str(given.pop("family")), "one", **given), tmp_path)
