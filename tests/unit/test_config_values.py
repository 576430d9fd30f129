"""Values of a Hugging Face config before a family reads them: kinds, ranges up to their ends, quantised files."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from moeref.families.model import FamilyError, UnmappedModelError
from moeref.families.quantised import file_blocks
from moeref.families.values import check_values

pytestmark = pytest.mark.cpu

COUNT, NUMBER = "a whole number from {} to {}", "a number above 0"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 64]}


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("hidden_size", 0, COUNT.format(1, 100_000_000)),
        ("hidden_size", 100_000_001, COUNT.format(1, 100_000_000)),
        ("hidden_size", 4.0, COUNT.format(1, 100_000_000)),
        ("hidden_size", "4", COUNT.format(1, 100_000_000)),
        ("hidden_size", True, COUNT.format(1, 100_000_000)),
        ("q_lora_rank", -1, COUNT.format(0, 100_000_000)),
        ("num_hidden_layers", 10_001, COUNT.format(1, 10_000)),
        ("num_nextn_predict_layers", 101, COUNT.format(0, 100)),
        ("num_experts", 65_537, COUNT.format(1, 65_536)),
        ("rms_norm_eps", 0, NUMBER),
        ("rms_norm_eps", float("inf"), NUMBER),
        ("rms_norm_eps", float("nan"), NUMBER),
        ("rope_theta", "1e6", NUMBER),
        ("rope_theta", True, NUMBER),
        ("tie_word_embeddings", 1, "true or false"),
        ("rope_scaling", "yarn", "a mapping"),
        ("layer_types", {"0": "full_attention"}, "a list"),
    ],
)
def test_a_value_that_no_model_has_is_named_with_what_it_must_be(key: str, value: Any, wanted: str) -> None:
    said = f"qwen3_moe: a value of this config has a wrong type or size: {key}={value!r}, and it must be {wanted}"
    with pytest.raises(FamilyError, match=f"^{re.escape(said)}$"):
        check_values({"model_type": "qwen3_moe", key: value}, "qwen3_moe")


def test_a_long_value_is_told_in_short() -> None:
    with pytest.raises(FamilyError, match=r"hidden_size='x+\.\.\.x+', and") as refused:
        check_values({"hidden_size": "x" * 10_000}, "qwen3_moe")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", n) for n in (1, 100_000_000, None)),
        *(("q_lora_rank", n) for n in (0, 100_000_000)),
        *(("rope_theta", n) for n in (1, 10**6, sys.float_info.min, sys.float_info.max)),
        ("tie_word_embeddings", False),
        ("rope_scaling", {}),
        ("layer_types", []),
        ("a_key_that_nothing_reads", object()),
    ],
)
def test_values_at_the_ends_of_a_range_pass(key: str, value: Any) -> None:
    check_values({key: value}, "qwen3_moe")


@pytest.mark.parametrize("more", [{}, {"fmt": "e4m3"}, {"activation_scheme": "dynamic"}])
def test_fp8_in_blocks_is_read(more: dict[str, Any]) -> None:
    assert file_blocks({"quantization_config": {**BLOCKS, **more}}, "deepseek_v3") == {"fp8_block": (128, 64)}
    single = {**BLOCKS, "weight_block_size": (1, 1)}
    assert file_blocks({"quantization_config": single}, "deepseek_v3") == {"fp8_block": (1, 1)}


@pytest.mark.parametrize("none", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_files_that_are_not_quantised_have_no_blocks(none: dict[str, Any]) -> None:
    assert file_blocks(none, "deepseek_v3") == {}


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "m" * 10_000},
        {"fmt": "e5m2"},
        {"activation_scheme": "static"},
        *({"weight_block_size": block} for block in (None, 128, [128], [128] * 3, [128, 0], [0, 128], [128, 1.0])),
    ],
)
def test_files_that_are_quantised_otherwise_are_refused(change: dict[str, Any]) -> None:
    kind = change.get("quant_method", "fp8")[:100]
    with pytest.raises(UnmappedModelError) as refused:
        file_blocks({"quantization_config": {**BLOCKS, **change}}, "deepseek_v3")
    assert str(refused.value) == (
        f"deepseek_v3: the checkpoint is quantised ({kind}), and only FP8 (e4m3) in blocks, INT4 in groups "
        "(pack-quantized, symmetric) and MXFP4 of gpt_oss are read; turn it into bf16 first and give that config"
    )
