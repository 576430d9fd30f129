"""Routing replay on megatron-core's routers, in a model of one rank."""

from __future__ import annotations

import json

import pytest
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]

CELLS = (
    Cell(family="glm4_moe", layout_name="one", layout=Layout(), layers=3),
    Cell(family="glm4_moe", layout_name="one", layout=Layout(), layers=3, mtp=1),
)
CHECKS = (
    "samples_in_one_microbatch_get_what_they_get_alone",
    "the_order_of_a_batch_is_recorded",
    "the_how_to_replays_as_written",
    "padding_is_not_counted_for_the_expert_bias",
    "routes_come_one_microbatch_at_a_time",
    "a_hole_in_one_layer_is_left_to_its_router",
    "the_targets_of_another_controller_are_the_same",
    "recorded_routes_replay_bit_for_bit",
    "a_step_of_no_token_is_refused",
    "given_rows_are_taken_and_missing_rows_are_not",
    "a_scope_in_a_scope_is_refused",
    "an_error_leaves_the_routers_native",
    "another_model_is_left_alone",
    "another_number_of_microbatches_is_refused",
    "a_forward_after_one_that_broke_off_is_refused",
    "what_cannot_be_replayed_is_refused",
    "recomputation_takes_the_same_routes",
    "mtp_routers_are_kept_apart",
    "mtp_layers_take_no_route_of_the_decoder",
    "mtp_layers_train_on_what_the_mask_says",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld) -> dict[str, str]:
    """What each check raised, or ""."""
    import replay_ranks

    found: dict[str, str] = {}
    folder = tmp_path_factory.mktemp("replay")
    with Shared(shared_world, "replay_ranks:target", deadline=240, entry="replay_ranks:check") as world:
        for number, cell in enumerate(CELLS):
            where = folder / f"cell{number}"
            where.mkdir()
            outcome = world.run(cell, where, expected(cell, folder).inputs, replay_ranks.target.claims)
            assert outcome.ok, outcome.error or next(e.text + "\n" + e.stderr_tail for e in outcome.exits if e.first)
            found |= json.loads((where / "rank0000" / "done.json").read_text())
    return found


def test_every_check_ran(done: dict[str, str]) -> None:
    assert done.keys() == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_replay_in_a_rank(name: str, done: dict[str, str]) -> None:
    assert not done[name], done[name]
