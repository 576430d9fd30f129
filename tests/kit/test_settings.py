"""The oracle of settings: what may be left out of a config, and when two values are the same to megatron-core."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig
from moeref_conformance.contract.api import Layout
from moeref_conformance.contract.requests.config import HONOURED
from moeref_conformance.oracles import settings
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu
FAMILIES = (
    *("deepseek_v3", "glm4_moe", "glm_moe_dsa", "gpt_oss", "kimi_k25", "minimax_m2"),
    *("mixtral", "qwen3_moe", "qwen3_next"),
)


def test_what_is_wanted_none_is_megatrons_default(variants: Path) -> None:
    wanted = dict(settings.of_the_layout(Layout()))
    for family in FAMILIES:
        one = cell(family, "one", layers=4)
        wanted |= settings.of_the_model(one, expected(one, variants))
    for request in HONOURED.values():
        wanted |= {name: value for name, value in request.overrides.items() if value is None}
    default = {field.name: field.default for field in dataclasses.fields(MLATransformerConfig)}
    left_out = {name for name, value in wanted.items() if settings.may_lack(name, value)} & default.keys()
    left_out -= settings.NEUTRAL.keys()
    assert {name: default[name] for name in left_out} == dict.fromkeys(left_out)
    assert {"moe_router_num_groups", "moe_shared_expert_intermediate_size", "mtp_num_layers"} <= left_out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_in_bf16_is_judged_where_transformers_computes_in_fp32(family: str, variants: Path) -> None:
    """DeepSeek-V3's and GLM's cast both operands, MiniMax-M2's is in fp32; the others cast the logits, if anything."""
    in_fp32 = family in ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "kimi_k25", "minimax_m2")
    for dtype in ("float32", "bfloat16"):
        one = cell(family, "one", layers=4, dtype=dtype)
        may_be = settings.router_dtype(one, expected(one, variants))
        assert {"fp32", "fp64"} <= {*may_be}
        assert (None in may_be) == (dtype == "float32" or not in_fp32)


@pytest.mark.parametrize(
    ("want", "have", "same"),
    [(8, 8, True), (8, 8.0, False), (8.0, 8, True), (1, True, False), (None, 1.0, False), (0.5, 0.5, True)],
)
def test_a_size_is_no_float_and_no_bool(want: object, have: object, same: bool) -> None:
    assert settings.fits("num_moe_experts", want, have) is same


@pytest.mark.parametrize("given", [{}, {"expert_tensor_parallel_size": None}, {"expert_tensor_parallel_size": 2}])
def test_an_expert_tensor_size_that_is_unset_is_the_tensor_size(given: dict[str, int | None]) -> None:
    made = settings.completed({"tensor_model_parallel_size": 2, **given})
    assert made == {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}


def test_an_expert_tensor_size_of_its_own_stays() -> None:
    given = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert settings.completed(given) == given
    assert settings.completed({"expert_tensor_parallel_size": None}) == {"expert_tensor_parallel_size": None}


def test_what_may_be_left_out() -> None:
    assert settings.may_lack("moe_router_num_groups", None)
    assert settings.may_lack("virtual_pipeline_model_parallel_size", 1)
    assert not settings.may_lack("virtual_pipeline_model_parallel_size", 2)
    assert settings.may_lack("moe_expert_capacity_factor", None)
    assert settings.may_lack("glu_linear_offset", 0.0)
    assert not settings.may_lack("glu_linear_offset", 1.0)
    assert not settings.may_lack("num_layers", 2)


def test_whole_numbers_of_yarn_in_a_file_are_the_floats_of_megatrons_fields(variants: Path) -> None:
    one = cell("deepseek_v3", "one", layers=4)
    model = dataclasses.replace(expected(one, variants))
    sizes = {"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1}
    sizes |= {"original_max_position_embeddings": 4096}
    yarn = {"type": "yarn", "factor": 40, **sizes}
    vars(model)["config"] = {**model.config, "rope_scaling": yarn}
    wanted, hints = settings.of_the_model(one, model), typing.get_type_hints(MLATransformerConfig)
    assert {name: type(wanted[name]) for name in sizes} == {name: hints[name] for name in sizes}
    assert {name: wanted[name] for name in sizes} == sizes


def test_whole_numbers_of_yarn_of_grouped_heads_are_floats_too(variants: Path) -> None:
    one = cell("gpt_oss", "one", layers=4)
    model = dataclasses.replace(expected(one, variants))
    yarn = {"rope_type": "yarn", "rope_theta": 10_000, "factor": 32, "beta_fast": 32, "truncate": False}
    vars(model)["config"] = {**model.config, "rope_parameters": yarn, "rope_scaling": yarn}
    wanted = settings.where_given(model)
    assert settings.fits("yarn_rotary_scaling_factor", wanted["yarn_rotary_scaling_factor"], 32.0)
    assert settings.fits("yarn_beta_fast", wanted["yarn_beta_fast"], 32)
    assert "position_embedding_type" not in wanted


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"moe_router_score_function": "sigmoid"}, {"moe_router_pre_softmax"}),
        ({"moe_router_score_function": "softmax"}, set()),
        ({"rope_type": "rope"}, {"rotary_scaling_factor"}),
        ({"rope_type": "rope", "mscale_all_dim": 1.0}, set()),
        ({"rope_type": "yarn"}, set()),
        ({"position_embedding_type": "rope", "yarn_beta_fast": 1.0}, {"yarn_beta_fast"}),
        ({"position_embedding_type": "yarn", "yarn_beta_fast": 1.0}, set()),
    ],
)
def test_what_megatron_does_not_read(given: dict[str, object], names: set[str]) -> None:
    assert settings.unread(given) == names
