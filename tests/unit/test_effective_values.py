"""What follows from settings follows the effective ones: MTP layers, shapes, padding, the padded vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from moeref.check import Report, check
from moeref.config import MoEConfig

#: 46 decoder layers and one MTP layer.
GLM = "glm-4.5-air"


def judged(model: str, layout: str, settings: dict[str, Any], **more: Any) -> Report:
    return check(model, layout, asked=MoEConfig(transformer_config_kwargs=settings), verify=False, **more)


@pytest.mark.parametrize(
    ("kinds", "coefficients", "layout", "said"),
    [
        ("global_aux_loss", 1e-3, "tp=2,cp=2,ep=4,etp=1,world=16", 4),
        (["seq_aux_loss", "global_aux_loss"], [0.0, 1e-3], "ep=8,world=8", 8),
        (["seq_aux_loss", "global_aux_loss"], [1e-3, 0.0], "ep=8,world=8", 0),
        ("global_aux_loss", 1e-3, "tp=2,ep=2,etp=1", 0),
        ("aux_loss", 1e-3, "ep=8,world=8", 0),
    ],
)
def test_a_global_balancing_loss_is_weaker_by_dp(kinds: Any, coefficients: Any, layout: str, said: int) -> None:
    """The kit's fault global-loss-of-megatron measures it."""
    asked = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients}
    report = judged("qwen3-30b-a3b", layout, asked)
    assert report.works
    assert [f"counts 1/{said} of" in note for note in report.notes if "#3672" in note] == [True] * bool(said)


@pytest.mark.parametrize("off", [0, None])
def test_a_run_without_mtp_has_no_mtp_layers_anywhere(off: int | None) -> None:
    plain, without = judged(GLM, "pp=2,ep=8", {}), judged(GLM, "pp=2,ep=8", {"mtp_num_layers": off})
    assert plain.stages[-1].holds == ("mtp", "head")
    assert without.stages[-1].holds == ("head",)
    assert without.works
    assert without.weights[1] < plain.weights[1]
    assert without.weights[0] == plain.weights[0]
    assert without.tensors < plain.tensors
    assert "1 MTP layers are left out" in without.notes[0]
    assert without.record is not None
    assert (without.record.model.mtp_layers, without.record.model.ignored) == (0, ("model.layers.46.",))
    assert not plain.notes or "MTP" not in plain.notes[0]


def test_a_layout_string_has_the_mtp_layers_of_the_run() -> None:
    bare, mtp = "pipeline_layout=Et*23|t*23L", "pipeline_layout=Et*23|t*23mL"
    for settings, text, works in (({}, mtp, True), ({}, bare, False)):
        assert judged(GLM, f"pp=2,ep=8,{text}", settings).works is works
    for text, works in ((mtp, False), (bare, True)):
        assert judged(GLM, f"pp=2,ep=8,{text}", {"mtp_num_layers": None}).works is works


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen3-30b-a3b", {"attention_output_gate": True}),
        ("qwen3-30b-a3b", {"moe_shared_expert_gate": True}),
        ("qwen3-30b-a3b", {"mtp_num_layers": 1}),
        ("qwen3-30b-a3b", {"qk_layernorm": False}),
        ("qwen3-30b-a3b", {"add_qkv_bias": True}),
        (GLM, {"mtp_num_layers": 2}),
    ],
)
def test_a_setting_that_changes_shapes_is_held_against_the_checkpoint(model: str, settings: dict[str, Any]) -> None:
    report = judged(model, "ep=8", settings)
    assert report.verdict == "refused"
    assert any("weights then do not fit" in problem.text for problem in report.problems), report.problems


def test_what_is_as_in_the_checkpoint_is_no_problem() -> None:
    same = {"qk_layernorm": True, "add_qkv_bias": False, "attention_output_gate": False, "mtp_num_layers": 0}
    assert judged("qwen3-30b-a3b", "ep=8", same).works


def test_padding_follows_the_attention_backend() -> None:
    plans = {name: judged(GLM, "tp=2,cp=2,ep=8,etp=1", {"attention_backend": name}) for name in ("fused", "flash")}
    multiples = {name: report.padding.plan.multiple for name, report in plans.items() if report.padding}
    assert (multiples["fused"] % (64 * 2), multiples["flash"]) == (0, 4)


def test_weights_follow_the_padding_of_the_vocabulary() -> None:
    padded = judged("gpt-oss-20b", "ep=8", {}, divisible_by=100_000).weights[0]
    assert padded > judged("gpt-oss-20b", "ep=8", {}).weights[0]
