"""What a record holds for a device, for Transformer Engine and for FP8, and what is refused before building.

Nothing here is built: that takes a GPU, or the kit's stand-in.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp8Recipe

from moeref import megatron
from moeref.bridge import ShardMap
from moeref.config import ConfigError, MoEConfig, Setting
from moeref.config.precision import FORMATS
from moeref.dispatcher import DispatcherError, Environment, padding
from moeref.families import Model
from moeref.layout import Layout
from moeref.megatron import device, precision
from moeref.record import Options, Record, installed_core
from tests.unit.models import CONFIGS, model

without_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
FUSIONS = (
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
)
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def record(asked: dict[str, Any] | None = None, dtype: str = "float32", **options: Any) -> Record:
    """The record of a small model with pass-through settings and options."""
    through = MoEConfig(transformer_config_kwargs=asked or {})
    return Record.of(model("qwen3_moe", dtype=dtype), Layout(), through, Options(**options))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_no_kernel_of_apex_is_asked_for(where: str) -> None:
    _, settings = megatron.transformer_config(record(), where)
    assert not any(settings[name] for name in FUSIONS)
    assert settings["use_cpu_initialization"] is (where == "cpu")


def test_experts_decide_on_grouped_gemm() -> None:
    def grouped(**asked: Any) -> Any:
        return record(**asked).settings["moe_grouped_gemm"]

    assert grouped(kernels="te", experts="grouped") is True
    assert grouped(kernels="te") is False
    assert grouped(experts="grouped") is False


def test_recipes_have_the_names_and_sizes_of_megatron() -> None:
    from megatron.core.fp8_utils import get_fp8_align_size

    assert set(RECIPES) == {recipe.value for recipe in Fp8Recipe} - {"custom"} == set(FORMATS)
    for recipe in RECIPES:
        # Megatron aligns what experts receive; a block of blockwise scaling is longer.
        assert padding.RECIPES[recipe] % get_fp8_align_size(Fp8Recipe(recipe)) == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_on_record(recipe: str) -> None:
    made = record(dtype="bfloat16", precision=recipe)
    settings = made.settings
    assert (made.precision, made.kernels, made.names.norms) == (recipe, "te", "fused")
    assert (settings["fp8_recipe"], settings.origin("fp8_recipe"), settings.origin("fp8")) == (recipe, "field", "field")
    assert settings["fp8"] == ("hybrid" if recipe in ("delayed", "tensorwise") else "e4m3")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"kernels": "triton"}, "none of torch, te"),
        ({"precision": "fp8"}, "none of bf16, fp32, tensorwise, delayed"),
        ({"kernels": "torch", "precision": "mxfp8"}, "give kernels='te'"),
        ({"kernels": "torch", "asked": {"fp8": "e4m3"}}, "would compute in the parameters' precision"),
        ({"precision": "mxfp8", "asked": {"fp8_recipe": "delayed"}}, "fp8_recipe='delayed' is asked for"),
        ({"precision": "mxfp8", "asked": {"fp8": None}}, "fp8=None is asked for"),
        ({"precision": "mxfp8", "dtype": "float32"}, "needs parameters in bfloat16"),
        ({"precision": "fp32"}, "needs parameters in float32"),
        ({"kernels": "te", "norms": "separate"}, "give norms='fused'"),
        ({"experts": "sequential", "asked": {"moe_grouped_gemm": True}}, "give experts='grouped'"),
        ({"kernels": "te", "experts": "grouped", "asked": {"moe_grouped_gemm": False}}, "te-groups-by-its-switch"),
        ({"replay": "R3", "asked": {"moe_enable_routing_replay": False}}, "replay R3 says True"),
    ],
)
def test_what_a_record_refuses(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        record(**{"dtype": "bfloat16", **asked})


def test_a_record_refuses_facts_that_its_settings_contradict() -> None:
    made = record(replay="R2")
    with pytest.raises(ConfigError, match="replay-needs-its-switch"):
        replace(made, settings=made.settings.with_settings({"moe_enable_routing_replay": Setting(False, "override")}))


def test_what_is_not_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="no FP8 recipe of delayed"):
        megatron.build(record(dtype="bfloat16", precision="nvfp4"), 0)
    other = "0.16.1" if Environment(core=installed_core()).minor != "0.16" else "0.19.2"
    with pytest.raises(ConfigError, match=f"the record is of megatron-core {other}"):
        megatron.build(record(core=other), 0)


@without_te
@pytest.mark.parametrize("family", CONFIGS)
def test_without_the_package_nothing_is_built(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"{family} with kernels='te'.*transformer_engine cannot be imported"):
        megatron.build(Record.of(model(family), Layout(), options=Options(kernels="te")), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_built() -> None:
    with pytest.raises(ConfigError, match="no CUDA device here"):
        megatron.build(record(), 0, "cuda:0")


def test_a_device_is_named() -> None:
    assert device.checked("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'cpu' or 'cuda:N'"):
        device.checked("meta")
    assert device.of([torch.nn.Identity(), torch.nn.Linear(1, 1, device="meta")]) == torch.device("meta")


def test_another_device_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.checked("cuda") == device.checked("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"cuda:1; call torch.cuda.set_device\(0\) first"):
        device.checked("cuda:0")


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_flex_kernels_are_asked_for_first(backend: str) -> None:
    asked = MoEConfig(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    with pytest.raises(DispatcherError, match="not installed") as error:
        megatron.build(Record.of(model("qwen3_moe"), Layout(ep=2), asked), 0)
    for reason in (f"{backend}-package", "flex-gpu", "flex-rows-bf16"):
        assert reason in str(error.value)


class _Config:
    def __init__(self, recipe: Any) -> None:
        self.fp8, self.fp8_recipe = "e4m3" if recipe else None, recipe


@pytest.mark.parametrize("recipe", ["mxfp8", Fp8Recipe.mxfp8])
def test_lengths_that_a_recipe_does_not_divide_are_refused(recipe: Any) -> None:
    layout = Layout(tp=2, cp=2)
    precision.check_length(_Config(None), layout, 7)
    precision.check_length(_Config(recipe), layout, 128)
    with pytest.raises(padding.PaddingError, match=r"no multiple of 128 .*mxfp8 GEMMs take 32 rows.*; pad it to 256"):
        precision.check_length(_Config(recipe), layout, 192)


def test_widths_that_a_recipe_does_not_divide_are_refused() -> None:
    wide = replace(
        model("qwen3_moe"), hidden=64, heads=4, kv_groups=2, head_dim=32, ffn=128, moe_ffn=64, param_dtype="bfloat16"
    )

    def check(at: Model, recipe: str | None, layout: Layout) -> None:
        precision.check_widths(ShardMap(at, layout), 0, _Config(recipe))

    check(wide, "mxfp8", Layout(tp=2))
    check(wide, "blockwise", Layout(tp=2))
    check(model("qwen3_moe"), None, Layout())
    with pytest.raises(ConfigError, match=r"multiples of 16.*linear_fc2.weight \[64, 8\]"):
        check(replace(wide, moe_ffn=16), "blockwise", Layout(tp=2))
    with pytest.raises(ConfigError, match=r"linear_fc2.weight \[64, 8\]"):
        check(replace(wide, moe_ffn=16), "delayed", Layout(tp=2))
