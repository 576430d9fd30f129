"""Seeding with megatron-core: errors that are raised before any generator is touched."""

from __future__ import annotations

import random

import pytest

from moeref.layout import Layout
from moeref.megatron import seeding
from moeref.seeds import SeedError

pytestmark = pytest.mark.cpu


def test_ranks_are_not_read_before_model_parallel_initialisation() -> None:
    before = random.getstate()
    with pytest.raises(SeedError, match="before model-parallel initialisation"):
        seeding.seed_rank(Layout(), 1234)
    assert random.getstate() == before


def test_states_that_lack_a_generator_are_refused_before_one_is_restored() -> None:
    before = random.getstate()
    with pytest.raises(SeedError, match="lack cuda, numpy, torch, trackers"):
        seeding.restore({"python": random.Random(1).getstate()})
    assert random.getstate() == before
