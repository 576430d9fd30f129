"""A choice is kept or refused; `auto` takes the first of its order and says what it passed over."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.config import Setting
from moeref.config.rules import contradictions
from moeref.dispatcher import (
    AUTO,
    RULES,
    Choice,
    DispatcherError,
    Environment,
    Setup,
    automatic,
    check,
    read,
    refusals,
    requirements,
    select,
    settings,
)
from moeref.layout import Layout

pytestmark = pytest.mark.cpu
ALL = Environment(packages=frozenset({"deep_ep", "hybrid_ep", "transformer_engine"}), gpu=True)
BARE = Environment()
SETUPS = st.builds(
    Setup,
    layout=st.sampled_from((Layout(), Layout(ep=4), Layout(ep=16), Layout(tp=2, ep=8, etp=2), Layout(tp=2, ep=2))),
    sequence_parallel=st.booleans(),
    experts=st.sampled_from((8, 16)),
    precision=st.sampled_from(("bf16", "fp32", "fp8", "fp4")),
    capacity_factor=st.sampled_from((None, 1.0)),
    pad_to_capacity=st.booleans(),
    variable_lengths=st.booleans(),
    equal_rows=st.booleans(),
)
ENVIRONMENTS = st.builds(
    Environment,
    core=st.sampled_from(("0.16.1", "0.19.2")),
    packages=st.frozensets(st.sampled_from(("deep_ep", "hybrid_ep", "transformer_engine"))),
    gpu=st.booleans(),
)


def chosen(setup: Setup, choice: Choice) -> Setup:
    return dataclasses.replace(setup, dispatcher=choice.dispatcher, backend=choice.backend_name or "deepep")


@given(SETUPS, ENVIRONMENTS, st.sampled_from(Choice))
def test_an_explicit_choice_is_kept_or_refused(setup: Setup, environment: Environment, choice: Choice) -> None:
    found = refusals(chosen(setup, choice), environment)
    if not found:
        assert select(choice, setup, environment).choice == choice
        assert select(str(choice), setup, environment).settings == settings(choice)
    else:
        with pytest.raises(DispatcherError) as error:
            select(choice, setup, environment)
        assert all(refusal.text in str(error.value) and refusal.fix in str(error.value) for refusal in found)


@given(SETUPS, ENVIRONMENTS, st.permutations(list(Choice)))
def test_auto_takes_the_first_usable_one(setup: Setup, environment: Environment, order: list[Choice]) -> None:
    usable = [choice for choice in order if not refusals(chosen(setup, choice), environment)]
    if usable:
        found = select(AUTO, setup, environment, order=lambda _: order)
        assert found.choice == usable[0]
        assert [choice for choice, _ in found.passed_over] == order[: order.index(usable[0])]
        assert all(reasons for _, reasons in found.passed_over)
    else:
        with pytest.raises(DispatcherError, match="no dispatcher is left"):
            select(AUTO, setup, environment, order=lambda _: order)


@pytest.mark.parametrize(
    ("layout", "environment", "expected"),
    [
        (Layout(), ALL, Choice.ALLTOALL),
        (Layout(ep=8), ALL, Choice.ALLTOALL),
        (Layout(ep=16), ALL, Choice.FLEX_DEEPEP),
        (Layout(ep=16), BARE, Choice.ALLTOALL),
        (Layout(ep=16), dataclasses.replace(ALL, packages=frozenset({"hybrid_ep"})), Choice.FLEX_HYBRIDEP),
    ],
)
def test_the_order_of_auto(layout: Layout, environment: Environment, expected: Choice) -> None:
    assert select(AUTO, Setup(layout=layout, experts=16), environment).choice == expected


def test_auto_tries_every_choice_in_a_large_group() -> None:
    assert set(automatic(Setup(layout=Layout(ep=16), experts=16))) == set(Choice)


@pytest.mark.parametrize("choice", Choice)
def test_both_fields_are_written_and_read(choice: Choice) -> None:
    # Megatron-Bridge #5207, #5740: a fallback cleared the backend and left the dispatcher at flex.
    assert read(settings(choice)) == choice
    assert set(settings(choice)) == {"moe_token_dispatcher_type", "moe_flex_dispatcher_backend"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": None}, "flex-None"),
        ({"moe_token_dispatcher_type": "alltoall_seq"}, "alltoall_seq"),
    ],
)
def test_fields_that_are_no_choice(fields: dict[str, object], words: str) -> None:
    with pytest.raises(DispatcherError, match=words):
        read(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": "hybridep"}, "would be ignored"),
        ({"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": True}, "drop the flag"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, object], words: str) -> None:
    asked = {name: Setting(value, "field") for name, value in {"num_moe_experts": 8, **fields}.items()}
    (problem,) = contradictions(asked, Layout(ep=2))
    assert words in problem


def test_fields_left_alone_are_megatrons_defaults() -> None:
    assert read({}) == Choice.ALLGATHER
    assert read({"moe_token_dispatcher_type": "flex"}) == Choice.FLEX_DEEPEP
    assert read({"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}) == Choice.FLEX_DEEPEP


def test_a_refusal_names_every_reason() -> None:
    setup = Setup(dispatcher="flex", backend="hybridep", layout=Layout(ep=2), precision="fp32", equal_rows=False)
    with pytest.raises(DispatcherError) as error:
        check(setup, BARE)
    assert [line.rpartition("[")[2] for line in str(error.value).splitlines()[1:]] == [
        "hybridep-package]",
        "equal-rows]",
        "flex-rows-bf16]",
        "flex-gpu]",
    ]
    assert "flex-hybridep under tp=1,pp=1,vpp=1,ep=2" in str(error.value)


@pytest.mark.parametrize("choice", Choice)
def test_requirements_are_the_rules_that_can_refuse_the_choice(choice: Choice) -> None:
    found = requirements(choice)
    assert {rule.stage for rule in found} == {"config", "construction", "step"}
    assert all(rule.text and rule.fix and rule.source for rule in found)


@given(SETUPS, ENVIRONMENTS, st.sampled_from(Choice))
def test_a_rule_refuses_only_choices_it_names(setup: Setup, environment: Environment, choice: Choice) -> None:
    named = {rule.id for rule in requirements(choice)}
    assert {refusal.rule for refusal in refusals(chosen(setup, choice), environment)} <= named


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Setup(dispatcher="pigeon"), "pigeon"),
        (lambda: Setup(backend="ncclep"), "ncclep"),
        (lambda: Setup(precision="int8"), "int8"),
        (lambda: Setup(topk=9), "topk=9"),
        (lambda: Environment(core="0.14.0"), r"0\.14\.0"),
        (lambda: Environment(packages=frozenset({"pplx"})), "pplx"),
        (lambda: select("pigeon", Setup(), BARE), "pigeon"),
    ],
)
def test_values_outside_the_table(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
