"""Settings that a config of megatron-core takes, and a layer or the first step refuses, ignores or computes wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from moeref.check import Report, check
from moeref.config import MoEConfig, step_rules

QWEN, GLM, LATENT, BIASES = "qwen3-30b-a3b", "glm-4.5-air", "glm-4.7-flash", "gpt-oss-20b"
FLAT, STAGES, CHUNKS = "ep=4,world=4", "pp=2,ep=4,world=8", "pp=2,vpp=2,ep=4,world=8"
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
_BALANCING, _GROUPS, _CHOICE = "moe_router_load_balancing_type", "moe_router_num_groups", "moe_router_group_topk"
_SINKHORN, _QUANTILE = {_BALANCING: "sinkhorn"}, {_BALANCING: "quantile_balancing"}

#: Rule, model, layout, settings, and options.
REFUSED: tuple[tuple[str, str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("sinkhorn-takes-no-loss", QWEN, FLAT, {**_SINKHORN, "moe_aux_loss_coeff": 0.01}, {}),
    ("sinkhorn-weighs-by-softmax", QWEN, FLAT, {**_SINKHORN, "moe_router_score_function": "sigmoid"}, {}),
    ("sinkhorn-weighs-by-softmax", QWEN, FLAT, {**_SINKHORN, "moe_router_topk_scaling_factor": 2.5}, {}),
    ("bias-needs-topk", GLM, FLAT, _SINKHORN, {}),
    ("bias-needs-topk", GLM, FLAT, _QUANTILE, {}),
    ("quantiles-are-plain", QWEN, FLAT, {**_QUANTILE, "moe_router_fusion": True}, {}),
    ("quantiles-are-plain", QWEN, FLAT, {**_QUANTILE, _GROUPS: 4, _CHOICE: 4}, {}),
    ("groups-hold-the-chosen", QWEN, FLAT, {_GROUPS: 32, _CHOICE: 1}, {}),
    ("groups-hold-the-chosen", QWEN, FLAT, {_GROUPS: 64, _CHOICE: 3}, {}),
    ("groups-hold-the-chosen", QWEN, FLAT, {_GROUPS: 32, _CHOICE: 16}, {}),
    ("groups-need-a-choice", QWEN, FLAT, {_GROUPS: 8}, {}),
    ("replay-needs-the-model-s-logits", QWEN, FLAT, {"moe_router_force_load_balancing": True}, {"replay": "R3"}),
    ("replay-needs-the-model-s-logits", QWEN, FLAT, {"moe_router_force_biased": 0.5}, {"replay": "R2"}),
    ("weights-on-inputs-need-one-expert", QWEN, FLAT, {"moe_apply_probs_on_input": True}, {}),
    ("full-recompute-goes-on", QWEN, FLAT, {**_FULL, "recompute_num_layers": 0}, {}),
    ("mtp-is-recomputed-alone", GLM, FLAT, {**_FULL, "recompute_num_layers": 2, "mtp_num_layers": 1}, {}),
    ("overlap-needs-virtual-stages", QWEN, STAGES, {"overlap_p2p_comm": True}, {}),
    ("overlap-is-unbatched", QWEN, CHUNKS, {"batch_p2p_comm": True}, {}),
    ("microbatch-groups-fill-the-pipeline", QWEN, CHUNKS, {"microbatch_group_size_per_vp_stage": 1}, {}),
    ("ring-exchange-needs-its-torch", QWEN, STAGES, {"use_ring_exchange_p2p": True}, {}),
    ("te-groups-biases-unfused", BIASES, FLAT, {"bias_dropout_fusion": True}, {"kernels": "te", "experts": "grouped"}),
    ("latent-attention-has-its-scale", LATENT, FLAT, {"softmax_scale": 0.5}, {}),
)
#: What is as good as nothing, or does what it says.
TAKEN: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    (QWEN, FLAT, {**_SINKHORN, "moe_aux_loss_coeff": 0.0}, {}),
    (GLM, FLAT, {"moe_aux_loss_coeff": 0.01, _BALANCING: "none"}, {}),  # verl's defaults
    (QWEN, FLAT, _QUANTILE, {}),
    (QWEN, FLAT, {_GROUPS: 8, _CHOICE: 4}, {}),
    (QWEN, FLAT, {_GROUPS: 16, _CHOICE: 1}, {}),
    (QWEN, FLAT, {_GROUPS: 1}, {}),
    ("deepseek-v3", "pp=8,ep=16,world=128,first=6,last=7", {}, {"replay": "R3"}),
    (QWEN, FLAT, {"moe_router_force_load_balancing": True}, {}),  # a benchmark
    (GLM, FLAT, {**_FULL, "recompute_num_layers": 1, "mtp_num_layers": 1}, {}),
    (QWEN, FLAT, {"overlap_p2p_comm": True}, {}),
    (QWEN, CHUNKS, {"overlap_p2p_comm": True}, {}),
    (QWEN, STAGES, {"batch_p2p_comm": True}, {}),
    (QWEN, CHUNKS, {"microbatch_group_size_per_vp_stage": 2}, {}),
    (QWEN, STAGES, {"microbatch_group_size_per_vp_stage": 1}, {}),
    (QWEN, FLAT, {"use_ring_exchange_p2p": True}, {}),
    (QWEN, FLAT, {"moe_mlp_glu_interleave_size": 32}, {}),  # of grouped experts alone
    (LATENT, FLAT, {"mla_down_proj_fusion": True}, {}),  # of Transformer Engine's layers alone
    (BIASES, FLAT, {"bias_dropout_fusion": True}, {"kernels": "te", "experts": "sequential"}),
    (QWEN, FLAT, {"bias_dropout_fusion": True}, {"kernels": "te", "experts": "grouped"}),
)


def report(model: str, layout: str, settings: dict[str, Any], options: dict[str, Any]) -> Report:
    return check(model, layout, asked=MoEConfig(transformer_config_kwargs=settings), verify=False, **options)


@pytest.mark.parametrize(("rule", "model", "layout", "settings", "options"), REFUSED, ids=str)
def test_what_a_first_step_meets_is_refused(
    rule: str, model: str, layout: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    found = report(model, layout, settings, options)
    assert found.verdict == "refused"
    assert any(f"[{rule}]" in problem.fix for problem in found.problems), found.problems


@pytest.mark.parametrize(("model", "layout", "settings", "options"), TAKEN, ids=str)
def test_what_works_is_not(model: str, layout: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    found = report(model, layout, settings, options)
    assert found.verdict == "works", found.problems


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, *_ in REFUSED} == {rule.id for rule in step_rules.RULES}


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            _QUANTILE,
            "moe_router_load_balancing_type='quantile_balancing' chooses experts itself: not those of the model",
        ),
        ({"softmax_scale": 0.5}, "softmax_scale=0.5 replaces None of the model's own config"),
        ({"recompute_modules": ["moe"]}, "recompute_modules=['moe'] has no effect: recompute_granularity is None"),
        ({"bf16": False}, "bf16=False leaves the parameters in bfloat16; precision fp32 reads them in float32"),
        ({"use_mup": True}, "use_mup=True replaces False of the model's own config"),
        ({"recompute_num_layers": 1}, "recompute_num_layers=1 has no effect: recompute_granularity is None"),
    ],
)
def test_what_does_something_else_is_told(settings: dict[str, Any], note: str) -> None:
    assert note in report(QWEN, FLAT, settings, {}).notes


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_modules": ["core_attn"]},  # Megatron's default
        {"recompute_modules": ["moe"], "recompute_granularity": "selective"},
        {"recompute_method": None, "recompute_num_layers": None},
        {"recompute_modules": ["layernorm"], "moe_layer_recompute": True},
    ],
)
def test_a_recompute_that_takes_place_has_no_note(settings: dict[str, Any]) -> None:
    assert not any("has no effect" in note for note in report(QWEN, FLAT, settings, {}).notes)


_TE = {"kernels": "te", "experts": "grouped"}


@pytest.mark.parametrize(
    ("model", "settings", "options"),
    [
        (QWEN, {"moe_mlp_glu_interleave_size": 32}, _TE),
        (QWEN, {"use_transformer_engine_op_fuser": True, "moe_single_grouped_weight": True}, _TE),
        (LATENT, {"mla_down_proj_fusion": True}, _TE),
        (GLM, {"use_grouped_gemm_for_shared_expert": True}, {}),
        (QWEN, {"hybrid_context_parallel": True}, {}),
    ],
)
def test_what_is_built_otherwise_has_no_verdict(model: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Whatever megatron-core's config class says to the setting, which `--verify` asks."""
    found = report(model, FLAT, settings, options)
    assert found.verdict == "unknown"
    name = list(settings)[-1]
    assert any(p.text.startswith(f"{name}=") and "does not map" in p.text for p in found.problems), found.problems


def test_the_share_of_rotary_positions_of_latent_attention_is_the_model_s() -> None:
    told = "rotary_percent=0.5 replaces 1.0 of the model's own config"
    assert told in report(LATENT, FLAT, {"rotary_percent": 0.5}, {}).notes


@pytest.mark.parametrize(
    ("group", "batch", "says"),
    [
        (4, 32, ""),
        (4, 24, ""),
        (4, 20, "5 microbatches leave a group of less than pp=2 microbatches, or have no whole one"),
        (64, 32, "8 microbatches leave a group of less than pp=2"),
        (2, 20, "5 microbatches are no multiple of pp=2"),
    ],
)
def test_microbatches_fill_the_groups_of_virtual_stages(group: int, batch: int, says: str) -> None:
    """CHUNKS has 4 replicas."""
    asked = {"microbatch_group_size_per_vp_stage": group}
    found = report(QWEN, CHUNKS, asked, {"training": {"global_batch_size": batch}})
    assert found.verdict == ("refused" if says else "works")
    assert says in "".join(problem.text for problem in found.problems)
