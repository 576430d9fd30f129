"""Seeding bugs: seeds planned, installed, saved and restored differently from Megatron."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Swapped, inventory
from moeref_conformance.selftest.faults.base import Fault, cell


class _Seeds(Swapped):
    """The good facet, on the rank of `world`."""

    def __init__(self, good: Any, cell: Cell, world: World) -> None:
        super().__init__(good)
        self.good, self.layout, self.rank = good, cell.layout, world.rank

    def stage(self, rank: int) -> int:
        """The pipeline stage of `rank`."""
        return topology.coords(self.layout, rank)["pp"]


class _OfTheFirstStage(_Seeds):
    """Leaves out the 100 that Megatron adds for each pipeline stage."""

    less = 100

    def planned(self, rank: int, seed: int, per_dp: bool) -> Mapping[str, int]:
        good = self.good.planned(rank, seed, per_dp)
        return {generator: value - self.less * self.stage(rank) for generator, value in good.items()}

    def install(self, seed: int, per_dp: bool) -> None:
        self.good.install(seed, per_dp)  # which refuses a bad seed
        self.good.install(seed - self.less * self.stage(self.rank), per_dp)


class _OneForEachStage(_OfTheFirstStage):
    """Adds 1 for each pipeline stage, not 100, so that stages meet the seeds of tensor-parallel ranks."""

    less = 99


class _NeverByReplica(_Seeds):
    """Data-parallel replicas share a seed even when each asks for its own."""

    def planned(self, rank: int, seed: int, per_dp: bool) -> Mapping[str, int]:
        good: Mapping[str, int] = self.good.planned(rank, seed, False)
        return good

    def install(self, seed: int, per_dp: bool) -> None:
        self.good.install(seed, False)


class _AlwaysTheSame(_Seeds):
    """Seeds everything with a number of its own: the seed that is asked for is not passed on."""

    def planned(self, rank: int, seed: int, per_dp: bool) -> Mapping[str, int]:
        self.good.planned(rank, seed, per_dp)  # which refuses a bad seed
        good: Mapping[str, int] = self.good.planned(rank, 42, per_dp)
        return good

    def install(self, seed: int, per_dp: bool) -> None:
        self.good.install(seed, per_dp)
        self.good.install(42, per_dp)


class _UniqueExperts(_Seeds):
    """Plans an expert seed that no other rank has."""

    def planned(self, rank: int, seed: int, per_dp: bool) -> Mapping[str, int]:
        return {**self.good.planned(rank, seed, per_dp), "expert": seed + 10_000 + rank}


class _NullIsOne(_Seeds):
    """Takes None, and 0, for the seed 1."""

    def planned(self, rank: int, seed: int, per_dp: bool) -> Mapping[str, int]:
        good: Mapping[str, int] = self.good.planned(rank, seed or 1, per_dp)
        return good

    def install(self, seed: int, per_dp: bool) -> None:
        self.good.install(seed or 1, per_dp)


class _Offset(_Seeds):
    """Seeds the generators with another seed than the one that is asked for."""

    def install(self, seed: int, per_dp: bool) -> None:
        self.good.install(seed, per_dp)  # which refuses a bad seed
        self.good.install(seed + 7, per_dp)


class _TorchAlone(_Seeds):
    """Leaves the generators of python and numpy as they were."""

    def install(self, seed: int, per_dp: bool) -> None:
        import random

        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        self.good.install(seed, per_dp)
        random.setstate(python)
        np.random.set_state(numpy)


class _DrawsOnResume(_Seeds):
    """Restores the states, then builds the data again, which draws from them."""

    def restore(self, states: Any) -> None:
        import torch

        self.good.restore(states)
        torch.randperm(3)


class _RestoresTheSavedDict(_Seeds):
    """Hands the dictionary that was saved to the tracker, which writes to it from then on."""

    def save(self) -> Any:
        from megatron.core import tensor_parallel

        return self.good.save(), dict(tensor_parallel.get_cuda_rng_tracker().get_states())

    def restore(self, states: Any) -> None:
        from megatron.core import tensor_parallel

        saved, trackers = states
        self.good.restore(saved)
        tensor_parallel.get_cuda_rng_tracker().set_states(trackers)


class _TrackersOfRank0(_Seeds):
    """One rank's trackers are saved for all, as if they were replicas of each other."""

    def save(self) -> Any:
        from megatron.core import tensor_parallel

        states: list[Any] = [dict(tensor_parallel.get_cuda_rng_tracker().get_states())]
        dist.broadcast_object_list(states, src=0)
        return self.good.save(), states[0]

    def restore(self, states: Any) -> None:
        from megatron.core import tensor_parallel

        saved, trackers = states
        self.good.restore(saved)
        tensor_parallel.get_cuda_rng_tracker().set_states({name: state.clone() for name, state in trackers.items()})


class _StatesOfRank0(_Seeds):
    """Rank 0's generators are saved for all ranks that were seeded as it was."""

    def save(self) -> Any:
        states: list[Any] = [self.good.save()]
        dist.broadcast_object_list(states, src=0)
        return {**self.good.save(), **{name: states[0][name] for name in ("python", "numpy", "torch", "cuda")}}


class _NotForShuffling(_Seeds):
    """The plan has the generators that draw weights and dropout alone."""

    def planned(self, rank: int, seed: int, per_dp: bool) -> dict[str, int]:
        plan = self.good.planned(rank, seed, per_dp)
        return {name: number for name, number in plan.items() if name not in ("python", "numpy")}


def _with(kind: type[_Seeds]) -> Callable[[Session, Cell, World], Any]:
    return lambda session, cell, world: Swapped(session, seeds=kind(session.seeds, cell, world))


def _beginning(seed: Callable[[str, World], int | None], part: str = "") -> Callable[[Session, Cell, World], Session]:
    """A fault's `wrap`: matrices with `part` in their name begin with numbers drawn from `seed(name, world)`.

    They begin with NaN where there is no seed.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Session:
        for (_, name), tensor in inventory(session).items():
            if tensor.dim() != 2 or part not in name:
                continue
            if (number := seed(name, world)) is None:
                tensor.fill_(float("nan"))
            else:
                tensor.normal_(generator=torch.Generator().manual_seed(number))
        return session

    return wrap


FAULTS = (
    Fault(
        id="stages-begin-alike",
        bug="S1 SkyRL#1212 in the weights: layers of two pipeline stages are drawn from one seed",
        rules=("SED-007",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_beginning(lambda name, world: zlib.crc32(name.encode())),
        says="begins as decoder.layers.0",
    ),
    Fault(
        id="routers-drawn-by-rank",
        bug="S5 in kind: what tensor-parallel ranks share is drawn from the generator in which they differ",
        rules=("SED-007",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_beginning(lambda name, world: world.rank, "mlp.router"),
        says="router.weight of chunk 0 begins otherwise than on rank 0",
    ),
    Fault(
        id="matrices-left-unset",
        bug="a module of one's own allocates its weight and leaves it to the checkpoint",
        rules=("SED-007",),
        cell=cell("deepseek_v3", "tp2", layers=3),
        wrap=_beginning(lambda name, world: None, "down_proj"),
        says="holds NaN or infinity",
    ),
    Fault(
        id="same-seed-on-every-stage",
        bug="S1 SkyRL#1212",
        rules=("SED-001", "SED-002"),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_with(_OfTheFirstStage),
        says="seeded alike",
    ),
    Fault(
        id="stages-meet-tensor-ranks",
        bug="a launcher that adds 1 for each stage: stage 0's second tensor-parallel rank begins as stage 1's first",
        rules=("SED-001", "SED-002"),
        cell=cell("qwen3_moe", "tp2-pp2"),
        wrap=_with(_OneForEachStage),
        says="which differ in pp and tp alone",
    ),
    Fault(
        id="replicas-share-one-seed",
        bug="S3 verl#5179",
        rules=("SED-001", "SED-002"),
        cell=cell("qwen3_moe", "tp1", world_size=2),
        wrap=_with(_NeverByReplica),
        says="per_dp: python, numpy, torch",
    ),
    Fault(
        id="only-torch-seeded",
        bug="a launcher that seeds torch and Megatron and forgets what shuffles the data",
        rules=("SED-002",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_TorchAlone),
        says="plain: python, numpy not seeded",
    ),
    Fault(
        id="shuffling-not-planned",
        bug="a plan of seeds that lists those of torch and Megatron, and leaves out what shuffles the data",
        rules=("SED-005",),
        cell=cell("qwen3_moe", "tp1", backend="static"),
        wrap=_with(_NotForShuffling),
        says="nothing is said of python, numpy",
    ),
    Fault(
        id="seeded-with-an-offset",
        bug="a launcher that adds a number of its own to the seed",
        rules=("SED-006",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_Offset),
        says="seeded otherwise",
    ),
    Fault(
        id="seed-not-passed-on",
        bug="B3 in kind: the launcher's seed is in a section that nobody reads, and every run begins with the same one",
        rules=("SED-001", "SED-002"),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_with(_AlwaysTheSame),
        says="seeded alike whatever the seed",
    ),
    Fault(
        id="null-taken-as-a-seed",
        bug="S4 verl#6503",
        rules=("SED-003",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_NullIsOne),
        says="seed None was taken",
    ),
    Fault(
        id="expert-seeds-made-unique",
        bug="S5: another formula than Megatron's, since the documented one collides",
        rules=("SED-005",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_with(_UniqueExperts),
        says="plain: expert",
    ),
    Fault(
        id="random-states-consumed-on-resume",
        bug="S6 Megatron-Bridge#5255",
        rules=("SED-004",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_DrawsOnResume),
        says="other draws of torch",
    ),
    Fault(
        id="trackers-of-rank-0",
        bug="Megatron-LM#6858: a rank's tracker is saved as a replica of rank 0's, and its peers resume with that",
        rules=("SED-004",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_with(_TrackersOfRank0),
        says="resumed: other draws of tp, expert",
    ),
    Fault(
        id="states-of-rank-0",
        bug="miles#3187: the generators of rank 0 are restored on all ranks, which had drawn unequally many numbers",
        rules=("SED-004",),
        cell=cell("qwen3_moe", "tp1", world_size=2),
        wrap=_with(_StatesOfRank0),
        says="resumed: other draws of python, numpy, torch",
    ),
    Fault(
        id="restored-states-written-to",
        bug="megatron-core's tracker keeps the dictionary it is given, so a second resume goes on from the first",
        rules=("SED-004",),
        cell=cell("qwen3_moe", "tp1"),
        wrap=_with(_RestoresTheSavedDict),
        says="resumed again: other draws of tp, expert",
    ),
)
