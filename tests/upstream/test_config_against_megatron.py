"""Settings in megatron-core's own TransformerConfig: they arrive, and what it derives is on record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from moeref import megatron
from moeref.config import ConfigError, EffectiveSettings, MoEConfig, apply, declared_differences, resolve
from moeref.layout import Layout
from moeref.record import Record
from tests.unit.models import CONFIGS, model

sys.path.insert(0, str(Path(__file__).parent))
import core_fields


def bare(family: str) -> Any:
    """An object as a framework would hand it over: its sizes are not the model's, so that each has to be set."""
    kind = MLATransformerConfig if model(family).mla else TransformerConfig
    return kind(num_layers=1, hidden_size=8, num_attention_heads=1)


def settings_with(**through: Any) -> EffectiveSettings:
    """The effective settings of a small model with pass-through settings."""
    return Record.of(model("qwen3_moe"), Layout(), MoEConfig(transformer_config_kwargs=through)).settings


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", ["", "tp=2,ep=2,etp=1", "pp=2,vpp=2"])
def test_a_real_config_holds_every_setting(family: str, layout: str) -> None:
    record = Record.of(model(family), Layout.parse(layout))
    config, done = megatron.transformer_config(record)
    for name, setting in record.settings.by_name.items():
        if setting.origin != "provider default":
            assert getattr(config, name) == setting.value or done.origin(name) == "derived", name
    assert {name: done[name] for name in done.by_name} == {name: getattr(config, name) for name in done.by_name}
    assert done.diff() == ()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_real_object_is_filled_like_one_that_is_made(family: str) -> None:
    target = bare(family)
    made, settings = megatron.transformer_config(Record.of(model(family), Layout(tp=2, etp=1)))
    apply(settings, target)
    # What the object derived from its first sizes stays, and nobody set it.
    assert declared_differences(target, made, declared=["output_layer_init_method"]).keys() <= {
        "output_layer_init_method"
    }


@pytest.mark.parametrize(
    "asked",
    [
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        {"moe_router_load_balancing_type": "aux_loss"},
        {"moe_grouped_gemm": True},
        {"moe_grouped_gemm": False},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
        {"moe_enable_routing_replay": True},
        {"moe_router_dtype": None},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite"])
def test_what_is_asked_for_arrives(family: str, asked: dict[str, Any]) -> None:
    first_class = {k: v for k, v in asked.items() if k in MoEConfig.__dataclass_fields__}
    through = {k: v for k, v in asked.items() if k not in first_class}
    record = Record.of(model(family), Layout(), MoEConfig(**first_class, transformer_config_kwargs=through))
    config, done = megatron.transformer_config(record)
    assert {name: getattr(config, name) for name in asked} == asked
    assert {name: done.origin(name) for name in asked} == {
        **dict.fromkeys(first_class, "field"),
        **dict.fromkeys(through, "override"),
    }
    target = bare(family)
    apply(record.settings, target)
    assert {name: getattr(target, name) for name in asked} == asked


def test_what_megatron_derives_is_on_record() -> None:
    asked = MoEConfig(transformer_config_kwargs={"ffn_hidden_size": None, "expert_tensor_parallel_size": None})
    layout = Layout(tp=2, pp=2, pipeline_layout="Ett|ttL")
    config, done = megatron.transformer_config(Record.of(model("qwen3_moe"), layout, asked))
    assert config.ffn_hidden_size == 4 * 24
    assert {d.name: d.effective.value for d in done.diff()} == {"ffn_hidden_size": 96, "expert_tensor_parallel_size": 2}
    for name in ("pipeline_model_parallel_layout", "ffn_hidden_size", "recompute_modules"):
        assert done.origin(name) == "derived"


@pytest.mark.parametrize(
    "asked",
    [
        {"sequence_parallel": True},
        {"moe_router_enable_expert_bias": True},
        {"moe_router_topk": 1},
        {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": 0.1},
        {"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": True},
    ],
    ids=str,
)
def test_what_moeref_refuses_megatron_refuses(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        settings_with(**asked)
    good = settings_with()
    given = {n: s.value for n, s in good.by_name.items() if s.origin != "provider default"}
    with pytest.raises((ValueError, AssertionError)):
        TransformerConfig(**{**given, **asked})


def test_grad_scale_func_is_a_real_optimizer_s_scale_loss() -> None:
    policy, reference = bare("qwen3_moe"), bare("qwen3_moe")
    optimizer = ChainedOptimizer([])
    record = settings_with()
    done = apply(record, policy, optimizer=optimizer)
    assert policy.grad_scale_func == optimizer.scale_loss
    assert done.origin("grad_scale_func") == "derived"
    apply(record, reference)
    assert reference.grad_scale_func is None
    assert declared_differences(policy, reference) == {}


def test_names_choices_and_refusals_are_those_of_the_installed_version() -> None:
    for asked, message in (
        ({"moe_router_topkk": 2}, "did you mean moe_router_topk"),
        ({"moe_token_dispatcher_type": "alltoal"}, "none of 'allgather', 'alltoall', 'flex'"),
        ({"moe_router_dtype": "fp16"}, "none of 'fp32', 'fp64'"),
        ({"moe_grouped_gemm": "yes"}, "neither True nor False"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings_with(**asked)
    target = bare("qwen3_moe")
    with pytest.raises(ConfigError, match=r"TransformerConfig refuses these settings: .*asked for: .*cpu_offloading"):
        apply(settings_with(cpu_offloading=True, cpu_offloading_num_layers=99), target)
    assert target.num_layers == 1


def test_a_mla_model_does_not_fit_the_plain_config() -> None:
    with pytest.raises(ConfigError, match="TransformerConfig has no kv_lora_rank"):
        resolve(model("deepseek_v3"), Layout(), provider=TransformerConfig)


def test_the_fields_that_are_known_without_megatron_are_the_installed_version_s() -> None:
    file = core_fields.FOLDER / f"{core_fields.minor()}.json"
    assert file.read_text(encoding="utf-8") == core_fields.text(), "run python tests/upstream/core_fields.py"
