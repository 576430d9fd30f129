"""What transformers computes under the routes that a target took, where the target chose for itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from moeref_conformance.contract.api import Claims
from moeref_conformance.judges import Case
from moeref_conformance.judges.observed_routes import oracle, oracle_of, seen_routes, without_route
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu
CELL = cell("glm4_moe", "one", layers=4, replay="R3")
CLAIMS = Claims(facets=frozenset({"replay"}), families=frozenset({"glm4_moe"}), backends=frozenset({"gloo"}))


def test_transformers_takes_all_choices_of_a_token_that_chose_otherwise_in_one_layer(variants: Path) -> None:
    case = Case(CELL, expected(CELL, variants), None, None, CLAIMS)
    native, place = oracle(case, "a"), max(without_route(case, "a"))
    first = min(native.experts)

    def chosen_after(other: frozenset[int]) -> dict[int, dict[tuple[int, int], frozenset[int]]]:
        """By transformers, if `other` are taken in the first layer."""
        taken = frozenset({(first, *place, other)})
        return routed.under(case.expected, "a", chosen=taken).experts  # type: ignore[arg-type]

    own = native.experts[first][place]
    free = sorted(set(range(8)) - own)
    others = [own - {lost} | {taken} for lost in own for taken in free]
    # One after which transformers chooses otherwise in a later layer, where the target keeps to what it chose before.
    later = [layer for layer in native.experts if layer > first]
    other = next(o for o in others if any(chosen_after(o)[layer] != native.experts[layer] for layer in later))
    seen = {layer: dict(places) for layer, places in native.experts.items()}
    seen[first][place] = other
    case.made[seen_routes.__wrapped__, "step-a"] = (seen, [])  # type: ignore[attr-defined]
    assert oracle_of(case, "step-a").experts == seen
