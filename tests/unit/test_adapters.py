"""The map of LoRA's matrices: names and shapes as PEFT has them, cut as the weights are."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from moeref import bridge
from moeref.bridge.adapters import AdapterMap, modules
from moeref.layout import Layout
from tests.unit import models

LATENT = ["down_proj", "gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj", "up_proj"]


def adapters(family: str, targets: list[str], changes: dict[str, Any] | None = None, **layout: Any) -> AdapterMap:
    model = models.model(family, **(changes or {}))
    return AdapterMap.of(bridge.ShardMap(model, Layout(**layout)), 3, tuple(targets))


def test_names_and_shapes_are_pefts() -> None:
    tensors = {t.name: t for param in adapters("qwen3_moe", ["v_proj", "down_proj"]).global_params for t in param.hf}
    first = "base_model.model.model.layers.0"
    assert tensors[f"{first}.self_attn.v_proj.lora_A.weight"][1:] == ((3, 24), "float32")
    assert tensors[f"{first}.self_attn.v_proj.lora_B.weight"][1:] == ((48, 3), "float32")
    assert tensors[f"{first}.mlp.experts.15.down_proj.lora_A.weight"].shape == (3, 56)
    assert len(tensors) == 4 * (2 + 2 * 16)


def test_modules_are_linears_of_the_decoders_layers() -> None:
    assert modules(models.model("deepseek_v3")) == LATENT
    assert modules(models.model("gpt_oss")) == ["k_proj", "o_proj", "q_proj", "v_proj"]  # experts are one tensor
    with_mtp = adapters("deepseek_v3", ["o_proj"], {"num_nextn_predict_layers": 1})
    assert with_mtp.model.mtp_layers == 1
    assert {param.layer for param in with_mtp.global_params} == {0, 1, 2, 3}
    assert len(with_mtp.local_shards(0)) == 2 * 4


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "vpp": 2}, {"tp": 16, "etp": 1}],
    ids=lambda layout: Layout(**layout).text,
)
def test_the_owners_shards_have_each_element_once(layout: dict[str, int]) -> None:
    held = adapters("qwen3_moe", ["k_proj", "o_proj", "up_proj", "down_proj"], **layout)
    for param in held.global_params:
        regions = [r for part in range(len(held.owners(param))) for r in held.shard(param, part).regions]
        for number, tensor in enumerate(param.hf):
            sizes = [
                prod(len(range(*of.indices(size))) for of, size in zip(region.hf_index, tensor.shape, strict=True))
                for region in regions
                if region.tensor == number
            ]
            assert sum(sizes) == prod(tensor.shape), param.name


def test_what_is_no_linear_is_refused() -> None:
    with pytest.raises(bridge.BridgeError, match="qwen3_moe: no linear is named gate, lm_head: adapters go to down_"):
        adapters("qwen3_moe", ["q_proj", "gate", "lm_head"])
