"""The oracle of FP8 in blocks: against transformers' modules and dequantisation, and against all numbers of e4m3."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.oracles import quantised as oracle
from moeref_conformance.oracles import recipes
from moeref_conformance.oracles.dialect import as_published
from moeref_conformance.oracles.published import mtp_layer
from moeref_conformance.selftest.faults.base import cell

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers 4 has other modules")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not hasattr(fp8, "Fp8Dequantize"), reason="transformers before 5.12 has it in another form"),
]
FAMILIES = sorted(request.BLOCKS)


def published(family: str) -> tuple[Any, dict[str, Any]]:
    """transformers' module of a tiny model, and the config that asks for FP8."""
    model = recipes.model(cell(family, "one", layers=3, dtype="bfloat16"))
    return model, request.config(as_published(json.loads(model.config.to_json_string(use_diff=False))))


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_in_fp8_are_those_of_transformers(family: str) -> None:
    from transformers import FineGrainedFP8Config

    model, config = published(family)
    asked = FineGrainedFP8Config(**config["quantization_config"])
    # transformers keeps the head whatever is listed, and takes a name for the beginning of others (transformers#47990).
    kept = [f"{name}$" for name in ("lm_head", *(asked.modules_to_not_convert or ()))]
    found = fp8.replace_with_fp8_linear(model, kept, asked)
    names = {name: module for name, module in found.named_modules() if type(module).__name__.startswith("FP8")}
    linears = {name for name, module in names.items() if type(module).__name__ == "FP8Linear"}
    experts = {
        f"{name}.{number}.{part}_proj"
        for name, module in names.items()
        if name not in linears
        for number in range(module.num_experts)
        for part in ("gate", "up", "down")
    }
    tensors = {f"{name}.weight": torch.empty(0) for name, _ in model.named_modules() if name.rpartition(".")[2]}
    tensors |= {f"{name}.weight": torch.empty(0) for name in experts}
    expected = {f"{name}.weight" for name in linears | experts}
    assert expected
    assert {*oracle.quantised(config, tensors)} == expected


def test_the_list_alone_tells_what_an_mtp_layer_keeps() -> None:
    """As published ones: who takes every linear that is not listed quantises no other."""
    model, config = published("qwen3_next")
    layer = mtp_layer("qwen3_next", 3, 0, model.state_dict())
    linears = {name: tensor for name, tensor in layer.items() if tensor.dim() == 2}
    listed = {f"{name}.weight" for name in config["quantization_config"]["modules_to_not_convert"]}
    assert linears.keys() & listed
    assert {*oracle.quantised(config, linears)} == linears.keys() - listed


BLOCK = (16, 8)


@pytest.mark.parametrize("shape", [(40, 56), (16, 32), (28, 40), (1, 33), (48, 64)])
def test_dequantisation_is_transformers(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(oracle.grid(weight.shape, BLOCK))
    # It takes whole blocks alone.
    whole = torch.zeros([n * of for n, of in zip(scales.shape, BLOCK, strict=True)]).to(weight.dtype)
    whole[: shape[0], : shape[1]] = weight
    found = fp8.Fp8Dequantize(None)._dequantize_one(whole, scales, torch.float32)[: shape[0], : shape[1]]
    assert torch.equal(oracle.dequantised(weight, scales, BLOCK), found)


def test_half_a_step_is_within_the_limit_and_a_whole_one_is_not() -> None:
    """At the numbers of e4m3, times the largest scale that is allowed: a block of them has half of it as its own."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers <= oracle.LARGEST / oracle.POWERS_OF_TWO]
    half = numbers.diff() / 2 * oracle.POWERS_OF_TWO
    halfway = numbers[:-1] * oracle.POWERS_OF_TWO + half
    limits = oracle.limits(torch.tensor([[*halfway, oracle.LARGEST]]), (1, len(numbers)))[0, :-1]
    assert (half <= limits).all()
    # Steps double where a mantissa begins anew, which depends on the scale: elsewhere more than half a step is allowed.
    first = (numbers[:-1].frexp().mantissa == 0.5) | (numbers[:-1] < 2.0**-6)
    assert (2 * half > limits)[first].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_a_block_of_zeros_and_some_are_no_whole_blocks(family: str) -> None:
    model, config = published(family)
    ends = ("_proj.weight", ".wk.weight", ".wq_b.weight", "_mqa.weight", "_qkv.weight", "_qkvz.weight", "_z.weight")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(ends)}
    names, block = oracle.quantised(config, tensors), request.BLOCKS[family]
    found = request.weights(tensors, block)
    largest = {name: oracle.largest(found[name], block) for name in names}
    assert all(int((blocks == 0).sum()) == 1 for blocks in largest.values())
    assert max(float(blocks.max() / blocks[blocks > 0].min()) for blocks in largest.values()) > 1000
    short = {tuple(n % of > 0 for n, of in zip(tensors[name].shape, block, strict=True)) for name in names}
    # Of Qwen3's experts, which transformers holds in one tensor, both sides end so, as of Qwen3.5's linears.
    more = {
        "deepseek_v3": {(False, False)},
        "deepseek_v32": {(False, False)},
        "qwen3_5_moe_text": {(True, True)},
        "qwen3_next": {(False, False)},
    }
    assert short == {(True, False), (False, True), *more.get(family, set())}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_checkpoint_loads_as_has_the_numbers_of_its_files(family: str) -> None:
    config = published(family)[1]
    tensors = {"model.layers.0.self_attn.q_proj.weight": 0.1 * torch.randn(42, 33), "model.norm.weight": torch.ones(3)}
    files = oracle.stored(config, tensors)
    name, _, scales = files
    assert files[name].dtype == torch.float8_e4m3fn
    assert scales == f"{name}_scale_inv"
    model = oracle.loaded(config, files)
    assert model.keys() == tensors.keys()
    assert model["model.norm.weight"] is tensors["model.norm.weight"]
    again = oracle.stored(config, model)
    assert all(torch.equal(again[key].float(), of.float()) for key, of in files.items())
    assert float((model[name].float() - tensors[name]).abs().max()) < 0.1 * float(tensors[name].abs().max())


def test_a_power_of_two_is_its_own_next_one() -> None:
    scales = torch.tensor([0.25, 0.26, 0.5, 1.0, 1.5, 2.0])
    assert oracle.next_power(scales).tolist() == [0.25, 0.5, 0.5, 1.0, 2.0, 2.0]
