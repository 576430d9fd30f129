"""Reference dispatch and combine against megatron-core's own dispatchers, rank by rank over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe import moe_utils
from moeref_conformance import strategies
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.plan import matrix
from moeref_conformance.worlds.forked import ForkedWorld

from moeref.dispatcher import padding, routing
from tests.kit.shared_world import Shared

CASES = 13


def _layouts() -> dict[str, Layout]:
    """The gloo layouts of the CPU matrix, one of all that dispatch cannot tell apart.

    The ranks that exchange rows are EP x ETP consecutive ones, and TP says whether the sequence is split.
    """
    found: dict[tuple[int, ...], tuple[str, Layout]] = {}
    for cell in matrix.load("cpu").cells:
        at = cell.layout
        if cell.backend == "gloo":
            sizes = {"tp": at.tp, "pp": at.pp, "cp": at.cp, "ep": at.ep, "etp": at.expert_tp, "world": at.world}
            alike = (at.ep, at.expert_tp, at.world, at.tp > 1)
            found.setdefault(alike, (cell.layout_name, Layout(**sizes)))
    return dict(found.values())


LAYOUTS = _layouts()


@pytest.fixture(scope="module")
def world(shared_world: ForkedWorld) -> ForkedWorld:
    return Shared(shared_world, "dispatch_ranks:target", deadline=120, entry="dispatch_ranks:compare")


@pytest.mark.cpu
@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_both_dispatchers_in_every_layout(name: str, world: ForkedWorld, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    cell = Cell(family="dispatch", layout_name=name, layout=layout)
    outcome = world.run(cell, tmp_path, {"hf_config": str(tmp_path)}, _claims())
    assert outcome.ok, outcome.error or next(e.text + "\n" + e.stderr_tail for e in outcome.exits if e.first)
    for rank in range(layout.world):
        done = json.loads((tmp_path / f"rank{rank:04d}" / "done.json").read_text())
        assert len(done) == 2 * CASES
        beside = sum("megatron-core" in who for _, _, *who in done)
        assert beside == 2 * CASES - (3 if layout.ep * layout.expert_tp > 1 else 0)


def _claims():  # type: ignore[no-untyped-def]
    import dispatch_ranks

    return dispatch_ranks.target.claims


def routed() -> st.SearchStrategy[tuple[torch.Tensor, torch.Tensor, int]]:
    """Weights without ties, their map, and k."""

    def scattered(drawn: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, torch.Tensor, int]:
        chosen, experts = drawn
        rows, topk = chosen.shape
        generator = torch.Generator().manual_seed(rows)
        weights = torch.randperm(rows * topk, generator=generator).reshape(rows, topk).double() + 1
        spread = torch.zeros(rows, experts, dtype=torch.float64)
        return spread.scatter(1, chosen, weights), spread.scatter(1, chosen, 1.0).bool(), topk

    return strategies.routes(rows=st.integers(1, 20), experts=st.integers(1, 9), most_topk=9).map(scattered)


@given(routed(), st.sampled_from((0.25, 0.5, 1.0, 1.5)), st.sampled_from(("probs", "position")), st.booleans())
def test_dropping(case: tuple[torch.Tensor, torch.Tensor, int], factor: float, policy: str, pad: bool) -> None:
    weights, chosen, topk = case
    rows, experts = chosen.shape
    if pad and routing.capacity(rows, topk, experts, factor) > rows:
        return
    ours = routing.drop(weights, chosen, topk, factor, policy=policy, pad=pad)
    real = moe_utils.apply_router_token_dropping(weights, chosen.clone(), topk, factor, policy, pad)
    assert torch.equal(ours[1].sum(0), real[1].sum(0))
    if policy == "probs":
        assert torch.equal(ours[0], real[0])
        assert torch.equal(ours[1] & chosen, real[1] & chosen)


@given(routed(), st.sampled_from((1, 2, 3, 8, 16)))
def test_alignment_for_quantisation(case: tuple[torch.Tensor, torch.Tensor, int], multiple: int) -> None:
    assert torch.equal(routing.aligned(case[1], multiple), moe_utils.pad_routing_map(case[1].clone(), multiple))


def test_rows_of_recipes() -> None:
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    for recipe in ("tensorwise", "delayed", "mxfp8"):
        assert padding.RECIPES[recipe] == get_fp8_align_size(Fp8Recipe(recipe))


def test_padding_to_a_capacity_beyond_the_rows_fails_upstream() -> None:
    """Why the table refuses it: with 4 rows, 2 experts, k 2 and factor 1.5 an expert has 6 places."""
    assert routing.capacity(4, 2, 2, 1.5) == 6
    with pytest.raises(RuntimeError, match="shape"):
        moe_utils.permute(
            torch.ones(4, 3),
            torch.ones(4, 2, dtype=torch.bool),
            probs=torch.ones(4, 2),
            num_out_tokens=12,
            drop_and_pad=True,
        )
