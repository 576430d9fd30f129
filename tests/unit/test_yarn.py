"""What a config says of rope, key by key, where YaRN may have scaled it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moeref import families
from moeref.families import FamilyError
from moeref.families.model import Yarn
from tests.unit.models import CONFIGS, model

pytestmark = pytest.mark.cpu

SHORT = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = Yarn(factor=4.0, original_positions=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0)


def yarn_of(**rope_parameters: Any) -> Yarn | None:
    mla = model("deepseek_v3", rope_parameters=rope_parameters).mla
    assert mla is not None
    return mla.yarn


def test_what_yarn_means() -> None:
    """The defaults are those of `_compute_yarn_parameters` in transformers."""
    assert yarn_of(**SHORT) == PLAIN
    assert yarn_of(**SHORT, beta_fast=24, beta_slow=2) == replace(PLAIN, beta_fast=24.0, beta_slow=2.0)
    assert yarn_of(**SHORT, mscale=0.8, mscale_all_dim=0.5) == replace(PLAIN, mscale=0.8, mscale_all_dim=0.5)
    assert yarn_of(rope_type="default", rope_theta=1e4) is None
    assert yarn_of(rope_theta=1e4) is None
    assert yarn_of(**SHORT, type="yarn") == yarn_of(**SHORT), "some files have the older key besides"
    assert model("gpt_oss", rope_parameters=SHORT).yarn == PLAIN
    assert model("qwen3_moe", rope_parameters=SHORT).yarn == PLAIN
    older = {k: v for k, v in SHORT.items() if k != "rope_theta"}
    read = model("qwen3_moe", rope_parameters=None, rope_theta=1e4, rope_scaling=older)
    assert read == model("qwen3_moe", rope_parameters=SHORT)


def test_rope_of_latent_attention_is_whole() -> None:
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert model("glm4_moe_lite", rope_parameters=inside) == model("glm4_moe_lite", partial_rotary_factor=1.0)
    assert model("glm4_moe_lite", rope_parameters=inside) == model("glm4_moe_lite")
    for changes in ({"rope_parameters": {**inside, "partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5}):
        with pytest.raises(FamilyError, match=r"^glm4_moe_lite: a partial_rotary_factor other than 1 is not mapped$"):
            model("glm4_moe_lite", **changes)


@pytest.mark.parametrize("factor", [1.5, 4.0])
@pytest.mark.parametrize("asked", [0.9, 1.0, 1.3])
def test_attention_factor_is_how_cos_and_sin_are_scaled(asked: float, factor: float) -> None:
    """megatron-core scales them by 0.1 · mscale · ln(factor) + 1."""
    yarn = model("qwen3_moe", rope_parameters={**SHORT, "factor": factor, "attention_factor": asked}).yarn
    assert yarn is not None
    assert 0.1 * yarn.mscale * math.log(factor) + 1 == pytest.approx(asked)
    assert replace(yarn, mscale=1.0) == replace(PLAIN, factor=factor)


def test_attention_factor_of_null_or_without_a_factor() -> None:
    assert model("gpt_oss", rope_parameters={**SHORT, "attention_factor": None}).yarn == PLAIN
    flat = {**SHORT, "factor": 1.0}
    assert model("gpt_oss", rope_parameters={**flat, "attention_factor": 1.0}).yarn == replace(PLAIN, factor=1.0)
    with pytest.raises(FamilyError, match=r"^gpt_oss: YaRN with attention_factor=1.3 and a factor of 1.0 is not"):
        model("gpt_oss", rope_parameters={**flat, "attention_factor": 1.3})


def test_grouped_queries_have_no_mscale_and_their_heads_are_asked_for() -> None:
    with pytest.raises(FamilyError, match=r"^qwen3_moe: rope type 'yarn' with \['mscale', 'mscale_all_dim'\] is not"):
        model("qwen3_moe", rope_parameters={**SHORT, "mscale": 0.8, "mscale_all_dim": 0.5})
    config = {k: v for k, v in CONFIGS["qwen3_moe"].items() if k != "num_key_value_heads"}
    with pytest.raises(FamilyError, match=r"^qwen3_moe: config.json has no num_key_value_heads"):
        families.read({**config, "rope_parameters": SHORT})


@pytest.mark.parametrize(
    ("rope_parameters", "says"),
    [
        (
            {**SHORT, "attention_factor": 1.0},
            r": rope type 'yarn' with \['attention_factor'\] is not mapped; 'default'",
        ),
        ({"rope_theta": 1e4, "factor": 4.0}, r": rope type 'default' with \['factor'\] is not mapped; 'default' and"),
        ({"rope_type": "linear", "rope_theta": 1e4}, r": rope type 'linear' with \[\] is not mapped; 'default' and"),
        ({**SHORT, "mscale_all_dim": 1.0}, ": YaRN with mscale_all_dim but without mscale is not mapped$"),
        ({k: v for k, v in SHORT.items() if k != "factor"}, r" \(YaRN\): config.json has no factor;"),
        (
            {k: v for k, v in SHORT.items() if k != "original_max_position_embeddings"},
            r" \(YaRN\): config.json has no original_max_position_embeddings;",
        ),
    ],
)
def test_what_yarn_may_not_say(rope_parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(FamilyError, match=f"^deepseek_v3{says}"):
        yarn_of(**rope_parameters)
