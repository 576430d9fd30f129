"""Losses of routers against transformers' own, and against their formulas token by token."""

from __future__ import annotations

import math

import pytest
import torch
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.cells import ROUTER_LOSS_COEFFICIENT, ROUTER_LOSSES
from moeref_conformance.contract.topology import microbatches
from moeref_conformance.oracles import balancing
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

ROWS, TOKENS, EXPERTS, TOP_K = 4, 5, 6, 2
PAIRS = ((0, 2), (1, 3))


@pytest.fixture
def logits_LBSE() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, TOKENS, EXPERTS, generator=generator) for _ in range(2)]


def added(kind: str, logits_LBSE: list[torch.Tensor], sigmoid: bool = False) -> float:
    lengths = [len(row_SE) for row_SE in logits_LBSE[0]]
    return float(balancing.added(kind, PAIRS, logits_LBSE, TOP_K, sigmoid, lengths)) / ROUTER_LOSS_COEFFICIENT


def of_transformers(logits_TE: torch.Tensor) -> float:
    """Of one layer; transformers counts each of a token's choices as a whole."""
    return float(load_balancing_loss_func((logits_TE,), EXPERTS, TOP_K)) / TOP_K


@pytest.mark.parametrize(
    ("last", "ways"),
    [(0, [-1.0, 0.0, 0.0, 1.0]), (1, [-1.0, math.nan, math.nan, 1.0]), (4, [math.nan] * 4)],
)
def test_biases_go_towards_the_mean_unless_tokens_that_may_count_decide(last: int, ways: list[float]) -> None:
    """Four experts have 2, 1, 1 and 0 tokens, and each token more takes two of them."""
    found = balancing.directions([{0, 1}, {0, 2}], 4, last)
    torch.testing.assert_close(found, torch.tensor(ways, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("aux_loss", PAIRS), ("seq_aux_loss", ((0,), (1,), (2,), (3,))), ("global_aux_loss", ((0, 1, 2, 3),))],
)
def test_balancing_is_transformers_of_each_part(
    kind: str, parts: tuple[tuple[int, ...], ...], logits_LBSE: list[torch.Tensor]
) -> None:
    layers = [[of_transformers(of_BSE[list(part)].flatten(0, 1)) for part in parts] for of_BSE in logits_LBSE]
    assert math.isclose(added(kind, logits_LBSE), sum(sum(of) / len(of) for of in layers), rel_tol=1e-5)


def test_sigmoid_scores_are_shares_of_a_token(logits_LBSE: list[torch.Tensor]) -> None:
    want = 0.0
    for of_BSE in logits_LBSE:
        chosen, mass = [0] * EXPERTS, [0.0] * EXPERTS
        for logits in of_BSE.flatten(0, 1).tolist():
            scores = [1 / (1 + math.exp(-x)) for x in logits]
            for expert in sorted(range(EXPERTS), key=lambda e: -scores[e])[:TOP_K]:
                chosen[expert] += 1
            mass = [m + score / sum(scores) for m, score in zip(mass, scores, strict=True)]
        tokens = ROWS * TOKENS
        want += EXPERTS * sum(c / (tokens * TOP_K) * m / tokens for c, m in zip(chosen, mass, strict=True))
    assert math.isclose(added("global_aux_loss", logits_LBSE, sigmoid=True), want, rel_tol=1e-5)


def test_z_loss_is_a_mean_over_tokens(logits_LBSE: list[torch.Tensor]) -> None:
    squares = [
        [math.log(sum(map(math.exp, logits))) ** 2 for logits in of_BSE.flatten(0, 1).tolist()]
        for of_BSE in logits_LBSE
    ]
    assert math.isclose(added("z_loss", logits_LBSE), sum(sum(of) / len(of) for of in squares), rel_tol=1e-5)


@pytest.mark.parametrize("kind", ROUTER_LOSSES)
def test_padding_does_not_count(kind: str, logits_LBSE: list[torch.Tensor]) -> None:
    lengths = [5, 3, 4, 1]

    def of(padding: float) -> float:
        padded = [logits.clone() for logits in logits_LBSE]
        for logits in padded:
            for row, length in enumerate(lengths):
                logits[row, length:] = padding
        return float(balancing.added(kind, PAIRS, padded, TOP_K, False, lengths))

    assert of(0.0) == of(9.0)


def test_each_kind_differs(logits_LBSE: list[torch.Tensor]) -> None:
    assert len({round(added(kind, logits_LBSE), 4) for kind in ROUTER_LOSSES}) == len(ROUTER_LOSSES)


def test_microbatches_are_those_of_the_replicas() -> None:
    def rows(**layout: int) -> tuple[tuple[int, ...], ...]:
        cell = Cell(family="qwen3_moe", layout_name="x", layout=Layout(**layout), batch="pairs")
        return microbatches(cell, ROWS)

    assert rows() == rows(tp=2) == ((0, 1), (2, 3))
    assert rows(ep=2) == rows(world=2) == PAIRS
