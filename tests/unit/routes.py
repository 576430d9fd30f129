"""Random valid routes for tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moeref.replay import Routes, routes


def random_routes(
    tokens: int,
    *,
    layers: tuple[int, ...] = (1, 2, 4),
    experts: int = 11,
    top_k: int = 3,
    seed: int = 0,
    start: int = 0,
) -> Routes:
    """Routes with random distinct experts in every row of every layer, and version 7."""
    rng = np.random.default_rng(seed)
    idx_TLK = rng.random((tokens, len(layers), experts)).argsort(axis=2)[:, :, :top_k]
    return routes(idx_TLK, layers=layers, experts=experts, version=7, start=start)


def any_routes(least: int = 0, most: int = 40) -> st.SearchStrategy[Routes]:
    """Routes of `least` to `most` tokens, with few or many experts."""
    return st.builds(
        random_routes,
        tokens=st.integers(least, most),
        layers=st.sampled_from([(0,), (1, 2, 4), (0, 3)]),
        experts=st.sampled_from([5, 256, 257, 384]),
        top_k=st.integers(1, 4),
        seed=st.integers(0, 99),
        start=st.integers(0, 5),
    )
