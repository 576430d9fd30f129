"""Families read configs strictly: what they cannot express is an error that says what and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeref import families
from moeref.families import FamilyError
from tests.unit.models import CONFIGS, model

pytestmark = pytest.mark.cpu


def test_unknown_model_type_lists_the_families() -> None:
    with pytest.raises(FamilyError, match="glm4_moe, qwen3_moe") as error:
        families.read({"model_type": "qwen3_mo"})
    assert "did you mean qwen3_moe" in str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "moe_intermediate_size", "num_experts_per_tok"])
def test_missing_key_is_named(name: str, key: str) -> None:
    config = {k: v for k, v in CONFIGS[name].items() if k != key}
    with pytest.raises(FamilyError, match=f"{name}.*{key}"):
        families.read(config)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("glm4_moe", {"num_nextn_predict_layers": 1}),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("qwen3_moe", {"num_key_value_heads": 3}),
        ("qwen3_moe", {"num_experts_per_tok": 17}),
    ],
)
def test_what_the_table_cannot_express_is_refused(name: str, change: dict[str, object]) -> None:
    with pytest.raises(FamilyError):
        model(name, **change)


def test_dense_layers() -> None:
    assert model("glm4_moe", first_k_dense_replace=3).moe_layers == (False, False, False, True)
    assert model("qwen3_moe", mlp_only_layers=[2]).moe_layers == (True, True, False, True)
    assert model("qwen3_moe", decoder_sparse_step=2).moe_layers == (False, True, False, True)


def test_rope_in_both_places() -> None:
    old = {k: v for k, v in CONFIGS["glm4_moe"].items() if k != "rope_parameters"}
    read = families.read({**old, "rope_theta": 5e5, "partial_rotary_factor": 0.25})
    assert (read.rope_theta, read.rotary_percent) == (5e5, 0.25)
    assert model("glm4_moe").rotary_percent == 0.5


def test_reads_a_folder_and_refuses_what_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="cannot read"):
        families.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    assert families.read(tmp_path) == families.read(tmp_path / "config.json") == model("qwen3_moe")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FamilyError, match="not a config object"):
        families.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FamilyError, match="cannot read"):
        families.read(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_dimension_of_the_table_is_known(name: str) -> None:
    m = model(name)
    for row in families.rows(m):
        for tensor in (*row.hf, *([row.fused] if row.fused else [])):
            assert set(tensor.dims) <= m.dims.keys()
