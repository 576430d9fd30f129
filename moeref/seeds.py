"""What every random generator of every rank is seeded with, and which of these seeds coincide. No torch.

The documented formula, with s = seed + 100·pp (+ 10·dp when asked), seeds six generators of a rank:

    python, numpy, torch, cuda   s
    tp                           s + 2718 + tp              Megatron's model-parallel tracker
    expert                       s + 1024 + 100·ep + etp    Megatron's expert-parallel tracker

Sources: `model_parallel_cuda_manual_seed` of megatron-core (both trackers) and `_set_random_seed` of Megatron-LM's
initialisation (s). The formula is not injective: pp and ep meet in the expert seed, dp ≥ 10 meets the next stage. Since
Megatron itself does so, that is reported by `collisions` and not hidden; `distinct` is the formula without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moeref.layout import Coords, Layout

Formula = Literal["megatron", "distinct"]
FORMULAS: tuple[Formula, ...] = ("megatron", "distinct")
#: numpy takes seeds below 2³².
LIMIT = 2**32
#: The axes along which each kind of generator has to differ; along all others ranks share a seed on purpose.
_AXES = {"default": ("pp",), "tp": ("pp", "tp"), "expert": ("pp", "ep", "etp")}


class SeedError(ValueError):
    """A seed that no generator can take, or a formula that does not exist."""


@dataclass(frozen=True)
class RankSeeds:
    """The seeds of one rank. `default` is that of python, numpy, torch and CUDA's default generator."""

    default: int
    tp: int
    expert: int

    @property
    def generators(self) -> dict[str, int]:
        """Seed by generator: python, numpy, torch, cuda, tp, expert."""
        return {
            **dict.fromkeys(("python", "numpy", "torch", "cuda"), self.default),
            "tp": self.tp,
            "expert": self.expert,
        }


@dataclass(frozen=True)
class Collision:
    """One seed at several places that should differ: `places` are the coordinates, or the generators of one rank."""

    generator: str
    seed: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """How many seeds of each kind are distinct, of how many that should be, and each that is not."""

    counts: dict[str, tuple[int, int]]  # kind -> (distinct, wanted)
    collisions: tuple[Collision, ...]
    #: Seeds that two trackers of one rank share: megatron-core refuses to add the second ("seed already exists").
    refused: tuple[Collision, ...]
    ranges: dict[str, tuple[int, int]]  # kind -> (lowest, highest) seed

    @property
    def text(self) -> str:
        """`expert: 22 distinct seeds of 64` for each kind that has collisions, then what megatron-core refuses."""
        lines = [
            f"{kind}: {have} distinct seeds of {want}" for kind, (have, want) in self.counts.items() if have < want
        ]
        lines += [f"{c.places[0]}: {c.generator} share seed {c.seed}; megatron-core raises" for c in self.refused]
        return "\n".join(lines)


def rank_seeds(
    layout: Layout, rank: int, seed: int, *, per_dp: bool = False, formula: Formula = "megatron"
) -> RankSeeds:
    """The seeds of `rank`. per_dp: data-parallel replicas get seeds of their own, as Megatron-LM's
    `--data-parallel-random-init` does.

    Raises SeedError unless `seed` is a positive integer and every seed that follows from it is below 2³².
    """
    check(layout, seed, per_dp=per_dp, formula=formula)
    return _seeds(layout, layout.coords(rank), seed, per_dp, formula)


def check(layout: Layout, seed: int, *, per_dp: bool = False, formula: Formula = "megatron") -> None:
    """Raises SeedError for what `rank_seeds` refuses, whatever the rank."""
    if formula not in FORMULAS:
        raise SeedError(f"formula {formula!r} does not exist; there are {', '.join(FORMULAS)}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 1:
        raise SeedError(f"seed={seed!r} must be a positive integer, which Megatron needs to seed its trackers")
    last = Coords(
        tp=layout.tp - 1,
        cp=0,
        dp=layout.dp - 1,
        pp=layout.pp - 1,
        etp=layout.etp - 1,
        ep=layout.ep - 1,
        edp=0,
    )
    highest = max(_seeds(layout, last, seed, per_dp, formula).generators.values())
    if highest >= LIMIT:
        raise SeedError(f"seed={seed} leads to {highest} on the last rank of {layout.text}; numpy takes less than 2³²")


def _seeds(layout: Layout, at: Coords, seed: int, per_dp: bool, formula: Formula) -> RankSeeds:
    dp = at.dp if per_dp else 0
    if formula == "megatron":
        base = seed + 100 * at.pp + 10 * dp
        return RankSeeds(default=base, tp=base + 2718 + at.tp, expert=base + 1024 + 100 * at.ep + at.etp)
    # Three blocks of numbers, one after the other, in each a number for every place.
    place = dp * layout.pp + at.pp
    places = layout.pp * (layout.dp if per_dp else 1)
    tp_block, expert_block = seed + places, seed + places + places * layout.tp
    return RankSeeds(
        default=seed + place,
        tp=tp_block + place * layout.tp + at.tp,
        expert=expert_block + (place * layout.ep + at.ep) * layout.etp + at.etp,
    )


def collisions(layout: Layout, seed: int, *, per_dp: bool = False, formula: Formula = "megatron") -> Report:
    """The seeds of all ranks of `layout` held against each other. Errors as in `rank_seeds`."""
    check(layout, seed, per_dp=per_dp, formula=formula)
    counts, ranges, found, refused = {}, {}, [], {}
    every = [(at, _seeds(layout, at, seed, per_dp, formula)) for at in _places(layout, per_dp)]
    for kind, axes in _AXES.items():
        at_seed: dict[int, dict[str, None]] = defaultdict(dict)
        for at, seeds in every:
            named = (*axes, "dp") if per_dp else axes
            at_seed[getattr(seeds, kind)][" ".join(f"{axis}{getattr(at, axis)}" for axis in named)] = None
        wanted = len({place for places in at_seed.values() for place in places})
        counts[kind] = (len(at_seed), wanted)
        ranges[kind] = (min(at_seed), max(at_seed))
        found += [Collision(kind, s, tuple(places)) for s, places in sorted(at_seed.items()) if len(places) > 1]
    for at, seeds in every:
        kinds: dict[int, list[str]] = defaultdict(list)
        for kind in _AXES:
            kinds[getattr(seeds, kind)].append(kind)
        for s, names in kinds.items():
            if len(names) > 1:
                refused[at.text] = Collision(" and ".join(names), s, (at.text,))
    return Report(counts, tuple(found), tuple(refused.values()), ranges)


def _places(layout: Layout, per_dp: bool) -> Iterator[Coords]:
    """The coordinates of all ranks that can differ in a seed: without `per_dp`, one data-parallel replica is enough
    of the dense grid, but the expert grid may reach over several."""
    seen = set()
    for rank in range(layout.world):
        at = layout.coords(rank)
        key = (at.pp, at.tp, at.ep, at.etp, at.dp if per_dp else 0)
        if key not in seen:
            seen.add(key)
            yield at
