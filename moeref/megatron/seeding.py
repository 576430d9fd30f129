"""Seeds, saves and restores the random generators of this rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

from moeref.layout import Coords, Layout
from moeref.megatron import groups
from moeref.seeds import Formula, RankSeeds, SeedError, rank_seeds, repeated


def here(layout: Layout) -> Coords:
    """This rank's coordinates in megatron-core.

    Raises SeedError before model-parallel initialisation, when all coordinates would be 0, and if `layout` gives this
    rank other coordinates.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise SeedError("ranks are read before model-parallel initialisation; call groups.initialise(layout) first")
    at = layout.coords(torch.distributed.get_rank())
    real = groups.coordinates()
    if real != vars(at):
        raise SeedError(f"megatron-core was initialised with another layout than {layout.text}: here {real}")
    return at


def seed_rank(layout: Layout, seed: int, *, per_dp: bool = False, formula: Formula = "megatron") -> RankSeeds:
    """Seed python, numpy, torch, CUDA and Megatron's RNG trackers on this rank, and return the seeds.

    Call it after model-parallel initialisation and before building the model. Raises SeedError as `rank_seeds` and
    `here` do, and for equal seeds on one rank, before any generator is changed.
    """
    at = here(layout)
    seeds = rank_seeds(layout, torch.distributed.get_rank(), seed, per_dp=per_dp, formula=formula)
    if shared := "; ".join(collision.refusal for collision in repeated(at, seeds)):
        raise SeedError(f"{layout.text}: {shared}; use formula='distinct'")
    random.seed(seeds.default)
    np.random.seed(seeds.default)
    torch.manual_seed(seeds.default)
    tensor_parallel.model_parallel_cuda_manual_seed(seeds.default)
    if formula == "distinct":
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add(megatron_random._DATA_PARALLEL_RNG_TRACKER_NAME, seeds.default)
        tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, seeds.tp)
        tracker.add(megatron_random._EXPERT_PARALLEL_RNG_TRACKER_NAME, seeds.expert)
    return seeds


def save() -> dict[str, Any]:
    """The states of all generators of this rank, for a checkpoint.

    Save after model and data are built, and restore after they are built again. Then no random number is repeated or
    skipped.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "trackers": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore(states: dict[str, Any]) -> None:
    """Restore what `save` returned. Raises SeedError if a generator is missing, before any is changed."""
    missing = {"python", "numpy", "torch", "cuda", "trackers"} - states.keys()
    if missing:
        raise SeedError(f"saved generator states lack {', '.join(sorted(missing))}")
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    # The tracker modifies the dictionary it gets, so it gets a copy.
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(states["trackers"]))
