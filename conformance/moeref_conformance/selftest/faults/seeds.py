"""Seeding bugs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Swapped


def _same_on_every_stage(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["seeds"]
    good = room._seeds

    def seeds(layout: Any, at: Any, *rest: Any) -> Any:
        return good(layout, replace(at, pp=0), *rest)

    return [Edit(room, "_seeds", seeds)]


def _replicas_share(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["seeds"]
    good = room._seeds

    def seeds(layout: Any, at: Any, seed: int, per_dp: bool, formula: Any) -> Any:
        return good(layout, at, seed, False, formula)

    return [Edit(room, "_seeds", seeds)]


def _unique(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["seeds"]
    good = room._seeds

    def seeds(layout: Any, at: Any, seed: int, per_dp: bool, formula: Any) -> Any:
        found = good(layout, at, seed, per_dp, formula)
        return replace(found, expert=good(layout, at, seed, per_dp, "distinct").expert)

    return [Edit(room, "_seeds", seeds)]


def _null_is_a_seed(rooms: Rooms) -> Iterable[Edit]:
    room = rooms["seeds"]
    good = room._seeds

    def seeds(layout: Any, at: Any, seed: Any, *rest: Any) -> Any:
        return good(layout, at, seed or 1, *rest)

    return [Edit(room, "_seeds", seeds), Edit(room, "check", lambda *args, **kwargs: None)]


class _Facet:
    """moeref's facet."""

    def __init__(self, good: Any) -> None:
        self._good = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._good, name)


class _SeedsTorchAlone(_Facet):
    """Leaves python and numpy to what the process began with."""

    def install(self, seed: int, per_dp: bool) -> None:
        import random

        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        self._good.install(seed, per_dp)
        random.setstate(python)
        np.random.set_state(numpy)


class _ConsumesOnResume(_Facet):
    """Restores, then builds the data again, which draws."""

    def restore(self, states: Any) -> None:
        import torch

        self._good.restore(states)
        torch.randperm(3)


class _RestoresTheStatesThemselves(_Facet):
    """Hands the saved dictionary to the tracker, which writes to it from then on."""

    def restore(self, states: Any) -> None:
        from megatron.core import tensor_parallel

        self._good.restore(states)
        tensor_parallel.get_cuda_rng_tracker().set_states(states["trackers"])


def _with(kind: type[_Facet]) -> Any:
    def wrap(session: Session, cell: Cell, world: World) -> Session:
        return Swapped(session, seeds=kind(session.seeds))

    return wrap


FAULTS = (
    Fault(
        id="same-seed-on-every-stage",
        bug="S1 SkyRL#1212",
        rules=("SED-001", "SED-002"),
        cell=cell("qwen3_moe", "pp2"),
        edits=_same_on_every_stage,
        says="seeded otherwise",
    ),
    Fault(
        id="replicas-share-one-seed",
        bug="S3 verl#5179",
        rules=("SED-001", "SED-002"),
        cell=cell("qwen3_moe", "tp1", world_size=2),
        edits=_replicas_share,
        says="per_dp: python, numpy, torch",
    ),
    Fault(
        id="only-torch-seeded",
        bug="a launcher that seeds torch and Megatron and forgets what shuffles the data",
        rules=("SED-002",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_SeedsTorchAlone),
        says="plain: python, numpy seeded otherwise",
    ),
    Fault(
        id="null-taken-as-a-seed",
        bug="S4 verl#6503",
        rules=("SED-003",),
        cell=cell("qwen3_moe", "tp1"),
        edits=_null_is_a_seed,
        says="seed None was taken",
    ),
    Fault(
        id="expert-seeds-made-unique",
        bug="S5: another formula than Megatron's, since the documented one collides",
        rules=("SED-001",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_unique,
        says="plain: expert",
    ),
    Fault(
        id="random-states-consumed-on-resume",
        bug="S6 Megatron-Bridge#5255",
        rules=("SED-004",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_ConsumesOnResume),
        says="other draws of torch",
    ),
    Fault(
        id="restored-states-written-to",
        bug="megatron-core's tracker keeps the dictionary it is given, so a second resume goes on from the first",
        rules=("SED-004",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_RestoresTheStatesThemselves),
        says="resumed again: other draws of tp, expert",
    ),
)
