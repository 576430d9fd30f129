"""A facet is one object: its module, its protocol, its place in the session, its steps and its rules agree."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moeref_conformance.contract import api
from moeref_conformance.contract.api import FACETS, Cell, Claims, Info, Layout, Session, World
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.records import REFUSALS
from moeref_conformance.contract.rules import judged_facets, load_rules
from moeref_conformance.resolve import resolve
from moeref_conformance.steps import gradients, replay
from moeref_conformance.steps.facet import Stage, Static, facets, rank_steps, static_steps

pytestmark = pytest.mark.cpu
EVERYTHING = Claims(facets=frozenset(FACETS), families=frozenset({"qwen3_moe"}), backends=frozenset({"gloo"}))
CELL = Cell(family="qwen3_moe", layout_name="one", layout=Layout(), replay="R3")


def test_a_facet_is_the_session_s_attribute_of_its_protocol() -> None:
    for facet in facets():
        attribute = vars(Session)[facet.name].fget
        assert typing.get_type_hints(attribute, vars(api))["return"] == facet.protocol | None
        assert facet.needs <= set(FACETS)
    assert tuple(facet.name for facet in facets()) == FACETS


def test_every_facet_is_judged_and_every_step_of_a_rule_is_taken() -> None:
    assert judged_facets() == set(FACETS)
    taken = {step.name for facet in facets() for step in facet.steps}
    # What every rank records, whatever is claimed, and what the kit sees of collectives and inputs.
    besides = {"close", "collectives", "hf", "inputs", "settings"}
    read = {step for rule in load_rules().values() for step in rule.steps}
    assert read <= taken | besides


def test_ranks_take_all_steps_in_order() -> None:
    assert [step.name for _, step in rank_steps(EVERYTHING, CELL)] == [
        *("topology", "names", "config", "seeds_planned", "seeds", "seeds_resumed", "padding", "dispatchers"),
        *(
            "exchange",
            "inventory",
            "begun",
            "load",
            "shards",
            "plan",
            "export",
            "left",
            "forward",
            "around_forward",
            "logprobs",
            "around_logprobs",
            "replayed_logprobs",
            "replay",
            "gradients",
            "on_no_token",
        ),
        *("change", "broken_off", "export_changed", "kept", "move", "own", "refuse_parameter", "refuse_buffer"),
        *("refuse_extra", "refuse_missing", "refuse_unlike", "around_loads", "refuse_routes"),
    ]


def test_a_cell_with_an_engine_asks_its_facet_alone() -> None:
    cell = Cell(family="qwen3_moe", layout_name="one", layout=Layout(), backend="engine")
    assert {facet.name for facet, _ in rank_steps(EVERYTHING, cell)} == {"sync"}
    assert not {facet.name for facet, _ in rank_steps(EVERYTHING, CELL)} & {"sync"}


def test_the_static_world_takes_the_pure_steps() -> None:
    every_rank, once = (static_steps(EVERYTHING, CELL, which) for which in (Static.EVERY_RANK, Static.ONCE))
    assert [step.name for _, step in every_rank] == ["names", "seeds_planned"]
    assert [step.name for _, step in once] == [
        *("config", "padding", "dispatchers", "plan", "delta", "delta_damaged", "delta_unlike"),
    ]


def test_refusals_come_last() -> None:
    steps = [step for facet in facets() for step in facet.steps if step.refusal]
    assert tuple(step.name for step in steps) == REFUSALS
    assert {step.stage for step in steps} == {Stage.CHANGED}


@pytest.mark.parametrize(
    ("claims", "cell", "left_out"),
    [
        ({"export"}, CELL, {"names", "forward", "replay", "gradients"}),
        ({"forward", "gradients", "replay"}, CELL, {"forward", "gradients", "replay", "load"}),
        (set(FACETS), replace(CELL, dtype="bfloat16"), {"gradients"}),
    ],
)
def test_what_is_not_claimed_or_not_asked_in_the_cell_is_left_out(
    claims: set[str], cell: Cell, left_out: set[str]
) -> None:
    some = Claims(facets=frozenset(claims), families=frozenset(), backends=frozenset())
    assert not left_out & {step.name for _, step in rank_steps(some, cell)}


class Promising:
    """Claims what nobody judges."""

    info = Info(name="promising", version="0")

    def __init__(self, facet: str) -> None:
        self.claims = Claims(facets=frozenset({"names", facet}), families=frozenset(), backends=frozenset())

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        yield None


LEDGER, NAMES = Promising("ledger"), Promising("names")


@pytest.mark.parametrize("target", ["LEDGER"])
def test_a_facet_that_nothing_judges_cannot_be_claimed(target: str) -> None:
    with pytest.raises(BadInput, match=f"claims an unknown facet '{target.lower()}'"):
        resolve(f"{__name__}:{target}")


def test_a_facet_without_a_rule_cannot_be_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(f"{__name__}:NAMES") is NAMES
    monkeypatch.setattr("moeref_conformance.resolve.judged_facets", lambda: frozenset(FACETS) - {"names"})
    with pytest.raises(BadInput, match="claims the facet 'names', which no rule judges"):
        resolve(f"{__name__}:NAMES")


def test_records_of_the_static_world_keep_equal_tables_once(tmp_path: Path) -> None:
    from moeref_conformance.contract.api import NameRow
    from moeref_conformance.steps.names import SharedTables

    def rows() -> list[NameRow]:
        return [NameRow(chunk=0, local="a", global_name="a", hf=("a",), shape=(2,), dtype="float32")]

    tables = SharedTables()
    assert tables.kept(rows()) is tables.kept(rows())


def test_an_answer_that_is_gone_after_a_step_is_infinitely_far() -> None:
    before = {"logits": torch.tensor([1.0, 2.0])}
    assert gradients.apart(before, before) == {"logits": 0.0}
    assert gradients.apart(before, {}) == {"logits": math.inf}


def test_a_method_that_takes_no_routes_is_told_so() -> None:
    def policy_gradients(tokens: str, entropy: float) -> str:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^policy_gradients\(\) is given `routes` as its last argument in a cell with"):
        replay.under(policy_gradients, "tokens", 0.5, routes=[])
    with pytest.raises(TypeError, match=r"^of its own$"):
        replay.under(lambda *given: policy_gradients("tokens", 0.5), "tokens", 0.5, routes=[])
    assert replay.under(lambda tokens, entropy, routes=None: routes, "tokens", 0.5, routes=["a"]) == ["a"]


def test_a_policy_s_steps_are_taken_under_routes_in_cells_that_have_them() -> None:
    cell = replace(CELL, loss_mask=True)
    policy = [step.name for facet, step in rank_steps(EVERYTHING, cell) if facet.name == "policy"]
    assert policy == ["policy_on_no_token", "policy", "plain_policy", "replayed_policy", "recomputed_policy"]
