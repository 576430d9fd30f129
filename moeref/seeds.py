"""The seed of each random generator of each rank, and which seeds coincide. No torch.

Megatron's formula, with s = seed + 100·pp (+ 10·dp with `per_dp`), seeds six generators of a rank:

    python, numpy, torch, cuda   s
    tp                           s + 2718 + tp              Megatron's model-parallel tracker
    expert                       s + 1024 + 100·ep + etp    Megatron's expert-parallel tracker

Sources: `model_parallel_cuda_manual_seed` of megatron-core (both trackers) and `_set_random_seed` of Megatron-LM's
initialisation (s). Different ranks can get the same seed: expert seeds collide across pp and ep, and from dp 10 on a
replica has the seed of the next stage. `collisions` reports this; formula "distinct" has no collisions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moeref.layout import Coords, Layout

Formula = Literal["megatron", "distinct"]
FORMULAS: tuple[Formula, ...] = ("megatron", "distinct")
#: numpy accepts seeds below 2³².
LIMIT = 2**32
#: The axes along which the seeds of each kind should differ. Along all others ranks share a seed on purpose.
_AXES = {"default": ("pp",), "tp": ("pp", "tp"), "expert": ("pp", "ep", "etp")}


class SeedError(ValueError):
    """A seed that a generator does not accept, or an unknown formula."""


@dataclass(frozen=True)
class RankSeeds:
    """The seeds of one rank. `default` seeds python, numpy, torch and CUDA's default generator."""

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
    """One seed in several places that should have different ones: `places` are coordinates of ranks."""

    generator: str
    seed: int
    places: tuple[str, ...]

    @property
    def refusal(self) -> str:
        """What megatron-core does if the generators are those of one rank."""
        return f"{self.places[0]}: {self.generator} share seed {self.seed}; megatron-core raises"


@dataclass(frozen=True)
class Report:
    """For each kind of seed, how many are distinct and how many should be, and every collision."""

    counts: dict[str, tuple[int, int]]  # kind -> (distinct, expected)
    collisions: tuple[Collision, ...]
    #: Seeds shared by two generators of one rank: megatron-core raises "seed already exists" for the second.
    refused: tuple[Collision, ...]
    ranges: dict[str, tuple[int, int]]  # kind -> (lowest, highest) seed

    @property
    def text(self) -> str:
        """`expert: 22 distinct seeds of 64` for each kind with collisions, then the ranks on which Megatron raises."""
        lines = [
            f"{kind}: {have} distinct seeds of {want}" for kind, (have, want) in self.counts.items() if have < want
        ]
        lines += [collision.refusal for collision in self.refused]
        return "\n".join(lines)


def rank_seeds(
    layout: Layout, rank: int, seed: int, *, per_dp: bool = False, formula: Formula = "megatron"
) -> RankSeeds:
    """The seeds of `rank`.

    per_dp: give each data-parallel replica its own seeds, as Megatron-LM's `--data-parallel-random-init` does. Raises
    SeedError for an unknown formula, a `seed` that is not a positive integer, and one from which any rank would get a
    seed of 2³² or more.
    """
    check(layout, seed, per_dp=per_dp, formula=formula)
    return _seeds(layout, layout.coords(rank), seed, per_dp, formula)


def check(layout: Layout, seed: int, *, per_dp: bool = False, formula: Formula = "megatron") -> None:
    """Raise SeedError for whatever `rank_seeds` refuses on any rank."""
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
    # Three consecutive blocks of numbers, one a kind, with a number for every place.
    place = dp * layout.pp + at.pp
    places = layout.pp * (layout.dp if per_dp else 1)
    tp_block, expert_block = seed + places, seed + places + places * layout.tp
    return RankSeeds(
        default=seed + place,
        tp=tp_block + place * layout.tp + at.tp,
        expert=expert_block + (place * layout.ep + at.ep) * layout.etp + at.etp,
    )


def collisions(layout: Layout, seed: int, *, per_dp: bool = False, formula: Formula = "megatron") -> Report:
    """Compare the seeds of all ranks of `layout`. Raises SeedError as `rank_seeds` does."""
    check(layout, seed, per_dp=per_dp, formula=formula)
    ranks = [(at, _seeds(layout, at, seed, per_dp, formula)) for at in _places(layout, per_dp)]
    counts, ranges, shared = {}, {}, []
    for kind, axes in _AXES.items():
        places_of = _places_by_seed(ranks, kind, (*axes, "dp") if per_dp else axes)
        counts[kind] = (len(places_of), len({place for places in places_of.values() for place in places}))
        ranges[kind] = (min(places_of), max(places_of))
        shared += [Collision(kind, s, tuple(places)) for s, places in sorted(places_of.items()) if len(places) > 1]
    refused = {at.text: collision for at, seeds in ranks for collision in repeated(at, seeds)}
    return Report(counts, tuple(shared), tuple(refused.values()), ranges)


def _places_by_seed(
    ranks: Sequence[tuple[Coords, RankSeeds]], kind: str, axes: Sequence[str]
) -> dict[int, dict[str, None]]:
    """The places that have each seed of `kind`, such as `pp0 ep1 etp0`, in order of first use."""
    places: dict[int, dict[str, None]] = defaultdict(dict)
    for at, seeds in ranks:
        places[getattr(seeds, kind)][" ".join(f"{axis}{getattr(at, axis)}" for axis in axes)] = None
    return places


def repeated(at: Coords, seeds: RankSeeds) -> Iterator[Collision]:
    """Seeds that several generators of the rank at `at` share, which megatron-core refuses."""
    kinds: dict[int, list[str]] = defaultdict(list)
    for kind in _AXES:
        kinds[getattr(seeds, kind)].append(kind)
    for seed, names in kinds.items():
        if len(names) > 1:
            yield Collision(" and ".join(names), seed, (at.text,))


def _places(layout: Layout, per_dp: bool) -> Iterator[Coords]:
    """The coordinates of one rank for each set of seeds. Without `per_dp` data-parallel ranks differ only by their
    expert coordinates."""
    seen = set()
    for rank in range(layout.world):
        at = layout.coords(rank)
        key = (at.pp, at.tp, at.ep, at.etp, at.dp if per_dp else 0)
        if key not in seen:
            seen.add(key)
            yield at
