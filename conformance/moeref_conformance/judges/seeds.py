"""SED: the seeds of every rank's generators, and the draws of a resumed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.requests.seeds import SEED, WAYS
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import finding, missing_records, values

_DEFAULT = ("python", "numpy", "torch", "cuda")
#: Of these, what weights are drawn from; the others order data, which stages may do alike.
_OF_WEIGHTS = ("torch", "cuda")
#: What places a rank among those that share its dense weights, and its experts.
_DENSE, _EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
_DRAWN = ("python", "numpy", "torch", "tp", "expert")


def formula(at: dict[str, int], seed: int, per_dp: bool) -> dict[str, int]:
    """The documented seeds at these coordinates: Megatron-LM's `_set_random_seed`, then megatron-core's
    `model_parallel_cuda_manual_seed`."""
    base = seed + 100 * at["pp"] + (10 * at["dp"] if per_dp else 0)
    trackers = {"tp": base + 2718 + at["tp"], "expert": base + 1024 + 100 * at["ep"] + at["etp"]}
    return {**dict.fromkeys(_DEFAULT, base), **trackers}


@judges("SED-001")
def planned_seeds_are_related(case: Case) -> Iterator[Finding]:
    """With one seed for all replicas, and with one for each."""
    yield from missing_records(case, "seeds_planned")
    yield from _relations(case, "seeds_planned")


@judges("SED-002")
def installed_states_are_related(case: Case) -> Iterator[Finding]:
    """States that differ from those before seeding, and between ranks as seeds do."""
    yield from missing_records(case, "seeds")
    for rank, value in values(case, "seeds"):
        for way in WAYS:
            if left := [name for name, state in value[way].items() if state in ("", value["spoiled"][name])]:
                yield finding(case, rank, "seeds", f"{way}: {', '.join(left)} not seeded")
    yield from _relations(case, "seeds")


def _relations(case: Case, step: str) -> Iterator[Finding]:
    """One finding for generators with the same values, and axes along which these are wrong.

    One more for those that another seed leaves as they are.
    """
    for rank, value in values(case, step):
        if fixed := [name for name, held in value["plain"].items() if held and held == value["other"].get(name)]:
            message = f"{', '.join(fixed)} seeded alike whatever the seed"
            yield finding(case, rank, step, message, got=value["plain"][fixed[0]])
    places = {rank: topology.coords(case.cell.layout, rank) for rank, _ in values(case, step)}
    for way, per_dp in WAYS.items():
        by_rank = {rank: value[way] for rank, value in values(case, step)}
        for names, grid, axes in _relations_of(per_dp):
            # Mostly several generators have the same seeds, which are looked at once.
            alike: dict[tuple[Any, ...], list[str]] = {}
            for name in names:
                alike.setdefault(tuple(held.get(name) for held in by_rank.values()), []).append(name)
            for (seeds, shared), (along, differ) in product(alike.items(), axes.items()):
                if pair := _wrong(places, dict(zip(by_rank, seeds, strict=True)), grid, along, differ):
                    message = f"{way}: {', '.join(shared)} seeded {'alike' if differ else 'otherwise'}"
                    ranks = f"ranks {pair[0]} and {pair[1]}, which differ in {' and '.join(along)} alone"
                    yield finding(case, pair[1], step, f"{message} on {ranks}")


def _relations_of(per_dp: bool) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], dict[tuple[str, ...], bool]]]:
    """Generators, the axes that place a rank, and along which of them seeds differ (True) or agree (False).

    Weights that ranks share begin alike, those that they do not share begin differently, and so do stages.
    """
    yield _DEFAULT, _DENSE, {("tp",): False, ("cp",): False, ("dp",): per_dp}
    yield _OF_WEIGHTS, _DENSE, {("pp",): True}
    yield ("tp",), _DENSE, {("pp", "tp"): True, ("cp",): False, ("dp",): per_dp}
    # Experts are looked at along one axis: 1024 + 100·ep + etp of a base with 100·pp meets itself on another stage.
    along_one: dict[tuple[str, ...], bool] = {("pp",): True, ("ep",): True, ("etp",): True}
    # With a seed for each replica, Megatron-LM gives replicas of an expert different ones too. Both are right.
    yield ("expert",), _EXPERT, along_one if per_dp else {**along_one, ("edp",): False}


def _wrong(
    places: Mapping[int, Mapping[str, int]],
    seeds: Mapping[int, Any],
    grid: tuple[str, ...],
    along: tuple[str, ...],
    differ: bool,
) -> tuple[int, int] | None:
    """Two ranks that differ `along` these axes alone and are seeded alike, or otherwise, against `differ`."""
    others = [name for name in grid if name not in along]
    met: dict[tuple[Any, ...], int] = {}
    for rank, at in places.items():
        line = tuple(at[name] for name in others)
        first = met.setdefault((*line, seeds[rank]) if differ else line, rank)
        if first != rank and (differ or seeds[first] != seeds[rank]):
            return first, rank
    return None


@judges("SED-005")
def planned_by_the_formula(case: Case) -> Iterator[Finding]:
    """Every generator of every rank, both ways."""
    yield from missing_records(case, "seeds_planned")
    for rank, value in values(case, "seeds_planned"):
        at = topology.coords(case.cell.layout, rank)
        for way, per_dp in WAYS.items():
            yield from _differences(case, rank, "seeds_planned", way, formula(at, SEED, per_dp), value[way])


@judges("SED-006", exact=True)
def installed_as_megatron_does(case: Case) -> Iterator[Finding]:
    """States of the generators after seeding against those after megatron-core's own seeding on the same rank."""
    yield from missing_records(case, "seeds")
    for rank, value in values(case, "seeds"):
        for way in WAYS:
            yield from _differences(case, rank, "seeds", way, value["megatron"][way], value[way])


@judges("SED-003")
def bad_seeds_are_refused(case: Case) -> Iterator[Finding]:
    """An error that says which seed, when planning and when seeding."""
    yield from missing_records(case, "seeds_planned")
    for step in ("seeds_planned", "seeds"):
        for rank, value in values(case, step):
            for bad, answer in value["refused"].items():
                if answer is None:
                    yield finding(case, rank, step, f"seed {bad} was taken")
                elif bad not in answer:
                    yield finding(case, rank, step, f"the refusal of seed {bad} does not name it", got=answer)


@judges("SED-004", exact=True)
def a_resumed_run_draws_on(case: Case) -> Iterator[Finding]:
    """The draws after each restore equal those of the run that was saved."""
    yield from missing_records(case, "seeds_resumed")
    for rank, value in values(case, "seeds_resumed"):
        want = value["went on"]
        for turn in ("resumed", "resumed again"):
            wrong = [name for name, a, b in zip(_DRAWN, want, value[turn], strict=True) if a != b]
            if wrong:
                message = f"{turn}: other draws of {', '.join(wrong)}"
                yield finding(case, rank, "seeds_resumed", message, expected=want, got=value[turn])


def _differences(
    case: Case, rank: int, step: str, way: str, want: dict[str, Any], have: dict[str, Any]
) -> Iterator[Finding]:
    """A finding for the generators that are seeded otherwise, and one for those of which nothing is said."""
    there, lacking = [name for name in want if name in have], [name for name in want if name not in have]
    if wrong := [name for name in there if have[name] != want[name]]:
        message, first = f"{way}: {', '.join(wrong)} seeded otherwise", wrong[0]
        yield finding(case, rank, step, message, expected=want[first], got=have[first])
    if lacking:
        message = f"{way}: nothing is said of {', '.join(lacking)}"
        yield finding(case, rank, step, message, expected=want[lacking[0]], got="nothing")
