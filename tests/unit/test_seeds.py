"""Seeds of ranks: Megatron's formula and its collisions, the formula without collisions, and bad seeds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.layout import Layout
from moeref.seeds import FORMULAS, LIMIT, SeedError, collisions, rank_seeds

layouts = st.builds(
    lambda tp, pp, ep, etp, dp: (
        Layout(tp=tp, pp=pp, ep=ep, etp=etp, world=0)
        if dp == 1
        else Layout(tp=tp, pp=pp, ep=ep, etp=etp, world=Layout(tp=tp, pp=pp, ep=ep, etp=etp).world * dp)
    ),
    tp=st.sampled_from((1, 2, 4, 8, 11)),
    pp=st.sampled_from((1, 2, 4)),
    ep=st.sampled_from((1, 2, 8, 22)),
    etp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 2, 3)),
)


def test_the_documented_formula() -> None:
    seeds = rank_seeds(Layout(tp=2, pp=2, ep=2, etp=1), 3, 1234)
    # rank 3 of tp2·pp2: tp 1, pp 1; of ep2: ep 1
    assert seeds.generators == {
        "python": 1334,
        "numpy": 1334,
        "torch": 1334,
        "cuda": 1334,
        "tp": 1334 + 2718 + 1,
        "expert": 1334 + 1024 + 100,
    }
    replicated = Layout(tp=1, pp=2, world=6)
    assert [rank_seeds(replicated, r, 7, per_dp=True).default for r in range(6)] == [7, 17, 27, 107, 117, 127]
    assert {rank_seeds(replicated, r, 7).default for r in range(6)} == {7, 107}


def test_what_the_documented_formula_makes_coincide() -> None:
    report = collisions(Layout(pp=4, ep=8, etp=2), 1234)
    assert report.counts == {"default": (4, 4), "tp": (4, 4), "expert": (22, 64)}
    assert report.text == "expert: 22 distinct seeds of 64"
    first = next(c for c in report.collisions if c.seed == 1234 + 1024 + 100)
    assert first.places == ("pp0 ep1 etp0", "pp1 ep0 etp0")
    # From dp 10 on a replica has the seed of the next stage.
    assert collisions(Layout(pp=2, world=22), 5, per_dp=True).counts["default"] == (21, 22)


def test_a_seed_twice_on_one_rank_is_what_megatron_refuses() -> None:
    (refused,) = collisions(Layout(tp=11, ep=22, etp=1), 1).refused
    assert "tp6" in refused.places[0]
    assert "ep17" in refused.places[0]
    assert refused.seed == 1 + 2718 + 6 == 1 + 1024 + 1700


@given(layout=layouts, per_dp=st.booleans())
def test_the_other_formula_has_no_collisions(layout: Layout, per_dp: bool) -> None:
    report = collisions(layout, 1, per_dp=per_dp, formula="distinct")
    assert not report.collisions
    assert not report.refused
    assert all(have == want for have, want in report.counts.values())


@given(layout=layouts, per_dp=st.booleans(), formula=st.sampled_from(FORMULAS))
def test_counts_are_those_of_all_ranks(layout: Layout, per_dp: bool, formula: str) -> None:
    axes = {"default": ("pp",), "tp": ("pp", "tp"), "expert": ("pp", "ep", "etp")}
    report = collisions(layout, 99, per_dp=per_dp, formula=formula)  # type: ignore[arg-type]
    for kind, names in axes.items():
        every = Counter[tuple[int, tuple[int, ...]]]()
        for rank in range(layout.world):
            at = layout.coords(rank)
            place = tuple(getattr(at, n) for n in (*names, *(("dp",) if per_dp else ())))
            every[getattr(rank_seeds(layout, rank, 99, per_dp=per_dp, formula=formula), kind), place] += 1  # type: ignore[arg-type]
        assert report.counts[kind] == (len({s for s, _ in every}), len({p for _, p in every}))
        assert report.ranges[kind] == (min(s for s, _ in every), max(s for s, _ in every))


@pytest.mark.parametrize("seed", [None, 0, -3, True, 1.5, "7"])
def test_a_bad_seed_is_refused_by_name(seed: object) -> None:
    with pytest.raises(SeedError, match=f"seed={seed!r}"):
        rank_seeds(Layout(), 0, seed)  # type: ignore[arg-type]


def test_a_seed_too_large_on_the_last_rank_is_refused_on_the_first() -> None:
    layout = Layout(pp=2)
    limit = LIMIT - 1 - 100 - 2718
    assert rank_seeds(layout, 0, limit)
    with pytest.raises(SeedError, match="numpy"):
        rank_seeds(layout, 0, limit + 1)


def test_an_unknown_formula_is_refused() -> None:
    with pytest.raises(SeedError, match="megatron, distinct"):
        rank_seeds(Layout(), 0, 1, formula="unique")  # type: ignore[arg-type]
