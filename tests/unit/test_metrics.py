"""Metrics are compared with explicit sums, and with the divergence that they estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moeref.replay import RouteError, agreement, mismatch, pad
from moeref.replay.metrics import ALIASES
from tests.unit.routes import random_routes

TRAINER = np.log([0.5, 0.2, 0.9, 0.1])
ENGINE = np.log([0.4, 0.5, 0.9, 0.3])


def test_definitions_written_out() -> None:
    found = mismatch(TRAINER, ENGINE, [1, 1, 1, 0])
    ratios = [0.5 / 0.4, 0.2 / 0.5, 1.0]
    assert found.tokens == 3
    assert found.k1 == pytest.approx(-sum(math.log(r) for r in ratios) / 3)
    assert found.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert found.mean_abs == pytest.approx(sum(abs(math.log(r)) for r in ratios) / 3)
    assert found.max_abs == pytest.approx(math.log(2.5))
    assert found.mult_prob_error == pytest.approx((1.25 + 2.5 + 1) / 3)
    assert found.f == {2.0: pytest.approx(1 / 3)}


def test_both_estimators_converge_to_the_divergence_of_engine_from_trainer() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    sampled = np.random.default_rng(0).choice(3, 200_000, p=q)
    found = mismatch(np.log(p)[sampled], np.log(q)[sampled])
    exact = float((q * np.log(q / p)).sum())
    assert found.k1 == pytest.approx(exact, rel=0.1)
    assert found.k3 == pytest.approx(exact, rel=0.02)
    assert found.k3 >= 0


def test_equal_sides_are_zero() -> None:
    found = mismatch(TRAINER, TRAINER)
    assert (found.k1, found.k3, found.mean_abs, found.max_abs, found.mult_prob_error) == (0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((TRAINER, ENGINE[:3]), r"\[4\] \(trainer\), \[3\] \(engine\)"),
        ((TRAINER.reshape(1, 4), ENGINE.reshape(4, 1)), r"\[1, 4\] \(trainer\), \[4, 1\] \(engine\)"),
        ((TRAINER, ENGINE, [[1, 1, 1, 0]]), r"\[1, 4\] \(mask\)"),
        ((TRAINER, ENGINE, [0, 0, 0, 0]), "no token is left"),
        ((TRAINER, [0, 0, 0, -np.inf]), "the engine has"),
        (([0, 0, 0, np.nan], ENGINE), "the trainer has"),
    ],
)
def test_what_has_no_mean_is_refused(arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(RouteError, match=says):
        mismatch(*arguments)


def test_names_of_frameworks() -> None:
    found = mismatch(TRAINER, ENGINE)
    for framework, names in ALIASES.items():
        assert found.named_as(framework).keys() == names.keys()
    assert found.named_as("verl")["rollout_corr/k3_kl"] == found.k3
    with pytest.raises(RouteError, match="no names of 'Verl'"):
        found.named_as("Verl")


def test_agreement_is_of_sets_by_layer() -> None:
    a, b = random_routes(6), random_routes(6)
    b.idx_TLK[:, 0] = b.idx_TLK[:, 0, ::-1]  # another order, the same experts
    used = set(b.idx_TLK[4, 2].tolist())
    b.idx_TLK[4, 2, 0] = next(e for e in range(11) if e not in used)
    found = agreement(a, b)
    assert found.by_layer == {1: 1.0, 2: 1.0, 4: pytest.approx(5 / 6)}
    assert found.overall == pytest.approx(17 / 18)
    assert found.first == (4, 4)
    assert agreement(a, a).first is None


def test_only_rows_given_on_both_sides_count() -> None:
    a, b = pad(random_routes(2, seed=1), right=3), pad(random_routes(2, seed=1), right=3)
    assert agreement(a, b).rows == 2
    with pytest.raises(RouteError, match="no row is given on both sides"):
        agreement(pad(random_routes(0), right=2), pad(random_routes(0), right=2))
