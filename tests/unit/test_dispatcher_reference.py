"""Reference dispatch on one rank against a loop over rows, routing maps that cannot be, and padding rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moeref_conformance import strategies
from moeref_conformance.contract.api import RoutedRows

from moeref.dispatcher import DispatcherError
from moeref.dispatcher.reference import DISPATCH, Groups, routing_map
from moeref.dispatcher.routing import aligned, capacity, drop, expert_counts, pad_rows

pytestmark = pytest.mark.cpu
HIDDEN = 3


def routed() -> st.SearchStrategy[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows (T, H), experts and weights (T, k), and one matrix an expert; T may be zero, experts may stay empty."""

    def with_matrices(rows: RoutedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        matrices = torch.randn(rows.experts, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
        return rows.x_TH, rows.experts_TK, rows.weights_TK, matrices

    return strategies.routed_rows(hidden=HIDDEN, padding=False).map(with_matrices)


def spread(experts_TK: torch.Tensor, weights_TK: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    empty = torch.zeros(experts_TK.shape[0], experts, dtype=torch.float64)
    return empty.scatter(1, experts_TK, weights_TK), routing_map(experts_TK, experts)


@pytest.mark.parametrize("name", DISPATCH)
@given(case=routed())
def test_every_row_gets_the_weighted_sum_of_its_experts(name: str, case: tuple[torch.Tensor, ...]) -> None:
    rows, experts, weights, matrices = (tensor.clone() for tensor in case)
    leaves = [tensor.requires_grad_() for tensor in (rows, weights, matrices)]
    found = DISPATCH[name](rows, *spread(experts, weights, len(matrices)), Groups())
    counts = Counter(experts.flatten().tolist())
    assert found.counts_L.tolist() == [counts[expert] for expert in range(len(matrices))]
    pieces = zip(found.rows_RH.split(found.counts_L.tolist()), matrices, strict=True)
    out = found.combine(torch.cat([piece @ matrix for piece, matrix in pieces]) * found.weights_R[:, None])
    expected = torch.zeros_like(rows)
    for row in range(len(rows)):
        for slot, expert in enumerate(experts[row].tolist()):
            expected[row] += weights[row, slot] * (rows[row] @ matrices[expert])
    torch.testing.assert_close(out, expected)
    loss = (torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape) ** 2).sqrt()
    ours = torch.autograd.grad((out * loss).sum(), leaves)
    theirs = torch.autograd.grad((expected * loss).sum() + 0 * sum(leaf.sum() for leaf in leaves), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@given(routed(), st.sampled_from((0.3, 1.0, 1.7)), st.sampled_from(("probs", "position")), st.booleans())
def test_dropping_keeps_the_best_rows_of_each_expert(
    case: tuple[torch.Tensor, ...], factor: float, policy: str, pad: bool
) -> None:
    _, experts, weights, matrices = case
    weights, chosen = spread(experts, weights, len(matrices))
    rows, topk = experts.shape
    places = capacity(rows, topk, len(matrices), factor)
    if pad and places > rows:
        with pytest.raises(DispatcherError, match="experts/topk"):
            drop(weights, chosen, topk, factor, policy=policy, pad=pad)
        return
    kept_weights, kept = drop(weights, chosen, topk, factor, policy=policy, pad=pad)
    for expert in range(len(matrices)):
        wanted = [row for row in range(rows) if chosen[row, expert]]
        if policy == "probs":
            wanted.sort(key=lambda row: -float(weights[row, expert]))
        best = set(wanted[:places])
        assert {row for row in range(rows) if kept[row, expert] and chosen[row, expert]} == best
        assert int(kept[:, expert].sum()) == (places if pad else len(best))
        assert kept_weights[:, expert].tolist() == [
            float(weights[row, expert]) if row in best else 0.0 for row in range(rows)
        ]


@given(routed(), st.integers(1, 6))
def test_alignment_adds_rows_and_takes_none(case: tuple[torch.Tensor, ...], multiple: int) -> None:
    rows, experts = case[0].shape[0], len(case[3])
    chosen = routing_map(case[1], experts)
    found = aligned(chosen, multiple)
    assert torch.equal(found & chosen, chosen)
    for before, after in zip(chosen.sum(0).tolist(), found.sum(0).tolist(), strict=True):
        assert after == min(-(-before // multiple) * multiple, rows)


def test_a_row_that_names_an_expert_twice_is_refused() -> None:
    with pytest.raises(DispatcherError, match=r"row 1 names an expert twice: \[0, 0\]"):
        routing_map(torch.tensor([[0, 1], [0, 0]]), 4)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_expert_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(DispatcherError, match="of 4 experts"):
        routing_map(torch.tensor([[0, index]]), 4)


@pytest.mark.parametrize("name", DISPATCH)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    rows, weights, chosen = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bool)
    for bad in (
        (rows[None], weights, chosen),
        (rows[:1], weights, chosen),
        (rows, weights[:, :3], chosen),
        (rows, weights, chosen.int()),
    ):
        with pytest.raises(DispatcherError):
            DISPATCH[name](*bad, Groups())


def test_padding_rows_are_spread_weigh_nothing_and_count_nothing() -> None:
    # Zero padding, as verl #7524 had it: every padding row goes to experts 0 and 1, or to expert 0 twice.
    experts = torch.tensor([[5, 2], [0, 0], [0, 0], [0, 0], [0, 0], [3, 1]])
    weights = torch.full((6, 2), 0.5, requires_grad=True)
    padding = torch.tensor([False, True, True, True, True, False])
    found, weighed = pad_rows(experts, weights, padding, 8)
    chosen = routing_map(found, 8)
    assert chosen[padding].sum(0).tolist() == [1] * 8
    assert torch.equal(found[~padding], experts[~padding])
    assert torch.equal(weighed[padding], torch.zeros(4, 2))
    assert torch.equal(torch.autograd.grad(weighed.sum(), weights)[0], (~padding).float()[:, None].expand(6, 2))
    assert expert_counts(chosen, padding).tolist() == [0, 1, 1, 1, 0, 1, 0, 0]


def test_no_padding_rows() -> None:
    experts, weights = torch.tensor([[1, 0]]), torch.ones(1, 2)
    found, weighed = pad_rows(experts, weights, torch.tensor([False]), 2)
    assert torch.equal(found, experts)
    assert torch.equal(weighed, weights)
