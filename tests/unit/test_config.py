"""What is asked for, what becomes effective, and what is refused: `moeref.config` without Megatron."""

from __future__ import annotations

import enum
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.config import (
    UNSET,
    ConfigError,
    EffectiveSettings,
    MoEConfig,
    apply,
    core,
    declared_differences,
    for_reference,
    resolve,
)
from moeref.dispatcher import Choice
from moeref.dispatcher import read as read_choice
from moeref.dispatcher import settings as dispatcher_settings
from moeref.dispatcher.setup import CORE, CORES
from moeref.layout import Layout
from tests.unit.models import model

ONE = Layout()
FIELDS = (
    "moe_token_dispatcher_type",
    "moe_router_load_balancing_type",
    "moe_grouped_gemm",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_flex_dispatcher_backend",
    "moe_enable_routing_replay",
)


def of(
    asked: MoEConfig | None = None, provider: Any = None, family: str = "qwen3_moe", layout: Layout = ONE
) -> EffectiveSettings:
    return resolve(model(family), layout, asked, provider=provider)


def with_all_names(base: type) -> type:
    """A dataclass that can hold whatever moeref sets, with the fields of `base` as they are."""
    names = of().by_name.keys() - base.__annotations__.keys()
    return dataclass(type("Whole", (base,), {"__annotations__": dict.fromkeys(names, object), **dict.fromkeys(names)}))


# Tri-state and precedence


def test_unset_keeps_what_the_provider_holds() -> None:
    provider = {
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "flex",
        "moe_router_load_balancing_type": "aux_loss",
    }
    record = of(provider=provider, layout=Layout(ep=2))
    for name, value in provider.items():
        assert record[name] == value
        assert record.origin(name) == "provider default"


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("held", [True, "flex", "sigmoid"])
def test_none_is_a_value_and_wins(name: str, held: Any) -> None:
    record = of(MoEConfig(**{name: None}), provider={name: held})
    assert record[name] is None
    assert record.origin(name) == "field"


@pytest.mark.parametrize("name", ["moe_grouped_gemm", "moe_router_enable_expert_bias", "moe_enable_routing_replay"])
def test_false_is_a_value_and_wins(name: str) -> None:
    record = of(MoEConfig(**{name: False}), provider={name: True}, family="glm4_moe")
    assert record[name] is False
    assert [s.value for s in record.trails[name]][-1] is False


LEVELS = {
    "provider default": lambda v, asked, provider: provider.update(moe_router_score_function=v),
    "field": lambda v, asked, provider: asked.update(moe_router_score_function=v),
    "override": lambda v, asked, provider: asked.setdefault("transformer_config_kwargs", {}).update(
        moe_router_score_function=v
    ),
}
STRENGTH = ["provider default", "hf", "field", "override"]


@pytest.mark.parametrize("levels", [c for n in range(4) for c in itertools.combinations(LEVELS, n)], ids=str)
def test_the_strongest_level_wins_and_the_others_are_on_record(levels: tuple[str, ...]) -> None:
    asked: dict[str, Any] = {}
    provider: dict[str, Any] = {}
    for level in levels:
        LEVELS[level](f"by {level}", asked, provider)
    record = of(MoEConfig(**asked), provider=provider)
    trail = record.trails["moe_router_score_function"]
    assert [s.origin for s in trail] == [level for level in STRENGTH if level in (*levels, "hf")]
    strongest = [level for level in STRENGTH if level in (*levels, "hf")][-1]
    assert record["moe_router_score_function"] == ("softmax" if strongest == "hf" else f"by {strongest}")


def test_a_field_that_the_pass_through_overrules_is_in_the_diff() -> None:
    asked = MoEConfig(moe_grouped_gemm=True, transformer_config_kwargs={"moe_grouped_gemm": False})
    record = of(asked)
    (difference,) = record.diff()
    assert (difference.name, difference.asked, difference.effective.value) == ("moe_grouped_gemm", True, False)
    assert "transformer_config_kwargs" in str(difference)
    assert record.origin("moe_grouped_gemm") == "override"


def test_own_defaults_replace_those_of_a_class_and_yield_to_an_object() -> None:
    @dataclass
    class Kind:
        hidden_dropout: float = 0.1

    whole = with_all_names(Kind)
    assert of(provider=whole)["hidden_dropout"] == 0.0
    assert of(provider=whole())["hidden_dropout"] == 0.1
    assert of(provider=whole()).origin("hidden_dropout") == "provider default"


@given(st.dictionaries(st.sampled_from(FIELDS), st.none(), max_size=7))
def test_every_key_that_is_asked_for_is_accounted_for(fields: dict[str, None]) -> None:
    record = of(MoEConfig(**fields, transformer_config_kwargs={"moe_z_loss_coeff": None}))
    assert {name: record.origin(name) for name in fields} == dict.fromkeys(fields, "field")
    assert record.origin("moe_z_loss_coeff") == "override"
    assert json.loads(json.dumps(record.to_plain()))["diff"] == []


def test_unset_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="is UNSET"):
        bool(UNSET)


@pytest.mark.parametrize(
    "wrong",
    [
        {"moe_grouped_gemm": "false"},
        {"moe_grouped_gemm": 1},
        {"moe_token_dispatcher_type": True},
        {"moe_router_load_balancing_type": []},
        {"moe_router_load_balancing_type": ["aux_loss", 1]},
        {"transformer_config_kwargs": "moe_grouped_gemm=true"},
    ],
)
def test_a_value_of_the_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MoEConfig(**wrong)


# Mappings


def test_a_mapping_with_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="moe_grouped_gem'; did you mean moe_grouped_gemm"):
        MoEConfig.from_mapping({"moe_grouped_gem": True})
    with pytest.raises(ConfigError, match="transformer_config_kwargs"):
        MoEConfig.from_mapping({"xyz": True})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"moe_token_dispatcher_type": "???"}, "mandatory"),
        ({"moe_token_dispatcher_type": "${policy.dispatcher}"}, "interpolation"),
        ({"transformer_config_kwargs": {"a": {"b": ["x", "${c}"]}}}, r"transformer_config_kwargs\.a\.b\[1\]"),
    ],
)
def test_what_yaml_left_open_is_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoEConfig.from_mapping(mapping)


def test_null_is_none_and_unset_is_unset() -> None:
    asked = MoEConfig.from_mapping(
        {"moe_grouped_gemm": None, "moe_router_score_function": "unset", "transformer_config_kwargs": None}
    )
    assert asked.fields == {"moe_grouped_gemm": None}
    assert asked.transformer_config_kwargs == {}


def test_omegaconf_is_resolved_and_its_lists_become_lists() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is an input of moeref.config, not a dependency")
    text = """
    policy: {dispatcher: alltoall, balancing: [aux_loss, seq_aux_loss]}
    reference:
      moe_token_dispatcher_type: ${policy.dispatcher}
      moe_router_load_balancing_type: ${policy.balancing}
      transformer_config_kwargs: {moe_aux_loss_coeff: [0.1, 0.2], recompute: {kinds: [a]}}
    """
    config = omegaconf.OmegaConf.create(text)
    asked = MoEConfig.from_mapping(config.reference)
    assert asked.moe_token_dispatcher_type == "alltoall"
    assert type(asked.moe_router_load_balancing_type) is list
    assert type(asked.transformer_config_kwargs["recompute"]["kinds"]) is list
    with pytest.raises(ConfigError, match="moe_grouped_gemm"):
        MoEConfig.from_mapping(omegaconf.OmegaConf.create({"moe_grouped_gemm": "???"}))
    with pytest.raises(ConfigError, match="moe_grouped_gemm"):
        MoEConfig.from_mapping(omegaconf.OmegaConf.create({"moe_grouped_gemm": "${nowhere}"}))


# Contradictions


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"moe_enable_routing_replay": True, "moe_router_fusion": True}, "moe_router_fusion"),
        ({"moe_enable_routing_replay": True, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": None}, "needs a backend"),
        ({"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": "deepep"}, "would be ignored"),
        ({"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": True}, "moe_enable_deepep"),
        ({"sequence_parallel": True}, "tp is 1"),
        ({"moe_router_enable_expert_bias": True}, "sigmoid"),
        ({"moe_router_topk": 1}, "always 1"),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1}, "coefficient"),
        ({"tensor_model_parallel_size": 2}, "layout"),
        ({"pipeline_model_parallel_layout": "Et|tttL"}, "layout"),
    ],
    ids=str,
)
def test_contradictions_are_refused(asked: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        of(MoEConfig(transformer_config_kwargs=asked))


def test_contradictions_depend_on_the_layout() -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel=False \(override\): training experts"):
        of(MoEConfig(transformer_config_kwargs={"sequence_parallel": False}), layout=Layout(tp=2))
    with pytest.raises(ConfigError, match="overlap_p2p_comm"):
        of(MoEConfig(transformer_config_kwargs={"overlap_p2p_comm": False}), layout=Layout(pp=2, vpp=2))
    same = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None, "sequence_parallel": True}
    assert of(MoEConfig(transformer_config_kwargs=same), layout=Layout(tp=2))["expert_tensor_parallel_size"] is None


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"moe_pad_expert_input_to_capacity": True}, "padding-needs-capacity"),
        ({"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"}, "capacity-needs-balancing"),
        (
            {
                "moe_expert_capacity_factor": 1.0,
                "moe_router_load_balancing_type": ["none", "sinkhorn"],
                "moe_aux_loss_coeff": [0.0, 0.0],
            },
            "capacity-needs-balancing",
        ),
        ({"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "first"}, "drop-policy"),
        ({"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": True}, "allgather-needs-one-length"),
        ({"moe_router_padding_for_quantization": True}, "routing-padding-needs-quantisation"),
        ({"moe_router_padding_for_fp8": True}, "routing-padding-needs-quantisation"),
        (
            {
                "moe_token_dispatcher_type": "flex",
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
            },
            "deepep-never-pads",
        ),
    ],
    ids=str,
)
def test_what_the_table_of_dispatchers_refuses_everywhere_is_refused(asked: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(MoEConfig(transformer_config_kwargs=asked), layout=Layout(ep=2))
    assert f"[{rule}]" in str(caught.value)
    # The older name of a setting stands for the newer one.
    said = [f"{name.replace('fp8', 'quantization')}=" for name in asked]
    assert any(name in str(caught.value) for name in said)


@pytest.mark.parametrize(
    "asked",
    [
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},  # the machine's packages
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"},  # beyond the table
        {"fp8": "e4m3", "moe_router_padding_for_quantization": True},
        {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "aux_loss"},
    ],
    ids=str,
)
def test_what_depends_on_the_machine_is_left_to_who_knows_it(asked: dict[str, Any]) -> None:
    assert of(MoEConfig(transformer_config_kwargs=asked), layout=Layout(ep=2)).diff() == ()


@pytest.mark.parametrize("choice", Choice)
def test_the_settings_of_a_choice_can_be_asked_for(choice: Choice) -> None:
    record = of(MoEConfig(**dispatcher_settings(choice)), layout=Layout(ep=2))
    assert {record.origin(name) for name in record.asked.fields} == {"field"}
    assert read_choice(record.values) == choice


def test_all_problems_are_told_at_once() -> None:
    wrong = {
        "moe_router_fusion": True,
        "moe_enable_routing_replay": True,
        "sequence_parallel": True,
        "context_parallel_size": 4,
    }
    with pytest.raises(ConfigError) as caught:
        of(MoEConfig(transformer_config_kwargs=wrong))
    assert all(name in str(caught.value) for name in wrong)


def test_a_provider_s_second_switch_follows_the_dispatcher() -> None:
    provider = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    record = of(MoEConfig(moe_token_dispatcher_type="alltoall"), provider=provider)
    assert record["moe_enable_deepep"] is False
    assert record.origin("moe_enable_deepep") == "derived"


# Fields of megatron-core where it is not installed


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_names_and_choices_are_known_without_megatron(version: str) -> None:
    kind = core.transformer_config(version)
    assert of(provider=kind).origin("moe_aux_loss_coeff") == "provider default"
    for asked, message in (
        ({"moe_router_topkk": 2}, "TransformerConfig has no moe_router_topkk; did you mean moe_router_topk"),
        ({"moe_token_dispatcher_type": "alltoal"}, "none of 'allgather', 'alltoall', 'flex'"),
        ({"moe_grouped_gemm": "yes"}, "neither True nor False"),
        ({"moe_router_topk": "two"}, "no integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            of(MoEConfig(transformer_config_kwargs=asked), provider=kind)
    with pytest.raises(ConfigError, match="has no kv_lora_rank"):
        of(family="deepseek_v3", provider=kind)
    assert of(family="deepseek_v3", provider=core.transformer_config(version, mla=True)).unchecked == ()


def test_fields_of_a_version_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"megatron-core 0\.14\.0: the fields of 0\.16, 0\.19"):
        core.transformer_config("0.14.0")


# Application


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Target:
    """As much of a provider as these tests need; its finalisation fills in, parses, and refuses like Megatron's."""

    moe_grouped_gemm: bool = True
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    moe_router_dtype: Literal["fp32"] | None = None
    filled: int | None = None
    scale: float = 1.0
    colour: Any = None
    grad_scale_func: Any = None
    modules: list[str] = field(default_factory=list)

    def finalize(self) -> None:
        self.filled = 7 if self.filled is None else self.filled
        self.colour = Colour(self.colour) if isinstance(self.colour, str) else self.colour
        self.modules.append("core")
        if self.moe_router_dtype == "fp32" and not self.moe_grouped_gemm:
            raise ValueError("fp32 wants grouped")


def record_for(target: Any, **asked: Any) -> EffectiveSettings:
    """A record of what is asked for alone, so that a small target can hold it."""
    whole = resolve(model("qwen3_moe"), ONE, MoEConfig(transformer_config_kwargs=asked))
    held = {n: t for n, t in whole.trails.items() if n in asked}
    return EffectiveSettings(whole.asked, held)


def test_applied_values_are_read_back_with_the_rest() -> None:
    target = Target()
    done = apply(record_for(target, moe_grouped_gemm=False, filled=None, colour="red"), target)
    assert (target.moe_grouped_gemm, target.filled, target.colour) == (False, 7, Colour.RED)
    assert {n: s.origin for n, s in done.by_name.items()} == {
        "moe_grouped_gemm": "override",
        "filled": "derived",
        "colour": "derived",
        "moe_token_dispatcher_type": "provider default",
        "moe_router_dtype": "provider default",
        "scale": "provider default",
        "grad_scale_func": "provider default",
        "modules": "provider default",
    }
    assert [d.name for d in done.diff()] == ["filled", "colour"]


class Swallowing(Target):
    """A subclass in whose property a value disappears, as in a constructor that does not pass it on."""

    @property
    def moe_grouped_gemm(self) -> bool:  # type: ignore[override]
        return True

    @moe_grouped_gemm.setter
    def moe_grouped_gemm(self, value: bool) -> None:
        """Drops the value."""


class ReadOnly(Target):
    @property
    def moe_grouped_gemm(self) -> bool:  # type: ignore[override]
        return True


class Replacing(Target):
    def finalize(self) -> None:
        self.moe_grouped_gemm = True


@pytest.mark.parametrize("kind", [Swallowing, Replacing])
def test_a_value_that_does_not_arrive_is_an_error_that_names_it(kind: type[Target]) -> None:
    target = kind()
    before = dict(vars(target))
    with pytest.raises(ConfigError, match="moe_grouped_gemm=False"):
        apply(record_for(target, moe_grouped_gemm=False), target)
    assert vars(target) == before


def test_a_value_that_cannot_be_set_is_an_error_that_names_it() -> None:
    target = object.__new__(ReadOnly)
    with pytest.raises(ConfigError, match="moe_grouped_gemm=False cannot be set"):
        apply(record_for(target, moe_grouped_gemm=False), target)


def test_a_name_that_the_target_lacks_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no moe_grouped_gemms; did you mean moe_grouped_gemm"):
        apply(record_for(Target(), moe_grouped_gemms=False), Target())


def test_what_the_target_refuses_says_what_was_asked_and_leaves_it_as_it_was() -> None:
    target = Target()
    with pytest.raises(ConfigError, match=r"fp32 wants grouped; asked for: .*moe_grouped_gemm"):
        apply(record_for(target, moe_grouped_gemm=False, moe_router_dtype="fp32"), target)
    assert target == Target()


def test_choices_and_truth_values_are_those_of_the_provider() -> None:
    kind = with_all_names(Target)
    with pytest.raises(ConfigError, match="'alltoal' is none of 'alltoall', 'allgather', 'flex'"):
        of(MoEConfig(moe_token_dispatcher_type="alltoal"), provider=kind)
    with pytest.raises(ConfigError, match="'fp16' is none of 'fp32'"):
        of(MoEConfig(transformer_config_kwargs={"moe_router_dtype": "fp16"}), provider=kind)
    with pytest.raises(ConfigError, match="neither True nor False"):
        of(MoEConfig(transformer_config_kwargs={"moe_grouped_gemm": "no"}), provider=kind)
    for value in ("many", True, 1.5):
        with pytest.raises(ConfigError, match=f"filled={value!r} is no integer"):
            of(MoEConfig(transformer_config_kwargs={"filled": value}), provider=kind)
    with pytest.raises(ConfigError, match="scale='much' is no number"):
        of(MoEConfig(transformer_config_kwargs={"scale": "much"}), provider=kind)
    assert of(MoEConfig(transformer_config_kwargs={"scale": 2}), provider=kind)["scale"] == 2
    with pytest.raises(ConfigError, match="no moe_router_dtyp; did you mean moe_router_dtype"):
        of(MoEConfig(transformer_config_kwargs={"moe_router_dtyp": "fp32"}), provider=kind)
    assert of(MoEConfig(transformer_config_kwargs={"moe_router_dtype": None}), provider=kind).unchecked == ()


class Optimizer:
    def scale_loss(self, loss: float) -> float:
        return 2 * loss


def test_grad_scale_func_is_the_optimizer_s_if_there_is_one() -> None:
    target, optimizer = Target(), Optimizer()
    done = apply(record_for(target), target, optimizer=optimizer)
    assert target.grad_scale_func(3.0) == 6.0
    assert done.origin("grad_scale_func") == "derived"
    reference = Target()
    apply(record_for(reference), reference)
    assert reference.grad_scale_func is None
    with pytest.raises(ConfigError, match="scale_loss"):
        apply(record_for(target), target, optimizer=object())


# Policy and reference


def test_policy_and_reference_share_one_source() -> None:
    asked = MoEConfig(moe_token_dispatcher_type="allgather")
    policy, reference = of(asked), of(for_reference(asked, moe_router_dtype="fp32"))
    assert declared_differences(of(asked), of(asked)) == {}
    with pytest.raises(ConfigError, match="moe_router_dtype is 'absent' for the policy and 'fp32' for the reference"):
        declared_differences(policy, reference)
    assert declared_differences(policy, reference, declared=["moe_router_dtype"]) == {
        "moe_router_dtype": ("absent", "fp32")
    }
    with pytest.raises(ConfigError, match="'moe_router_dtyp' is no setting; did you mean moe_router_dtype"):
        declared_differences(policy, reference, declared=["moe_router_dtype", "moe_router_dtyp"])


def test_every_field_that_drifts_is_listed() -> None:
    one = {"moe_grouped_gemm": True, "x": 1, "hidden_dropout": 0.0, "grad_scale_func": print}
    other = {"moe_grouped_gemm": 1, "x": 2, "hidden_dropout": 0.0, "grad_scale_func": None}
    with pytest.raises(ConfigError) as caught:
        declared_differences(one, other)
    assert "moe_grouped_gemm" in str(caught.value)
    assert "x is 1" in str(caught.value)
    assert "grad_scale_func" not in str(caught.value)


def test_every_supported_version_of_megatron_core_has_its_fields() -> None:
    folder = Path(core.__file__).parent / "fields"
    assert {file.stem for file in folder.iterdir()} == set(CORES)
    assert CORE.rpartition(".")[0] in CORES


@pytest.mark.parametrize("problems", [[], ["a is unknown", "b is no number"]])
def test_an_error_always_lists_its_problems(problems: list[str]) -> None:
    error = ConfigError("nothing fits", problems)
    assert error.problems == (tuple(problems) or ("nothing fits",))
    assert str(error) == "nothing fits"
