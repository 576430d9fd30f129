"""Seeds the generators of this rank, saves them and puts them back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

from moeref.layout import Coords, Layout
from moeref.seeds import Formula, RankSeeds, SeedError, rank_seeds


def here(layout: Layout) -> Coords:
    """This rank's coordinates as megatron-core has them; `layout` has to say the same.

    Raises SeedError before model-parallel initialisation, when every rank would read zeros, and where the two differ.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise SeedError("ranks are read before model-parallel initialisation; call groups.initialise(layout) first")
    at = layout.coords(torch.distributed.get_rank())
    found = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "edp": parallel_state.get_expert_data_parallel_rank(),
    }
    if found != vars(at):
        raise SeedError(f"megatron-core was initialised with another layout than {layout.text}: here {found}")
    return at


def seed_rank(layout: Layout, seed: int, *, per_dp: bool = False, formula: Formula = "megatron") -> RankSeeds:
    """Seed python, numpy, torch, CUDA and both trackers of Megatron on this rank, and say with what.

    Comes after model-parallel initialisation and before the model is built. Raises SeedError as `seeds.rank_seeds` and
    `here` do, before any generator is touched.
    """
    here(layout)
    seeds = rank_seeds(layout, torch.distributed.get_rank(), seed, per_dp=per_dp, formula=formula)
    if len({seeds.default, seeds.tp, seeds.expert}) < 3:
        raise SeedError(
            f"megatron-core refuses a seed twice on one rank: {seeds} ({layout.text}); use formula='distinct'"
        )
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
    """The states of all generators of this rank, for a checkpoint. Saved after the model and the data are made, and
    restored after they are made again, no draw is repeated or lost."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "trackers": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore(states: dict[str, Any]) -> None:
    """Put back what `save` gave. Raises SeedError for states that lack a generator, before any is touched."""
    missing = {"python", "numpy", "torch", "cuda", "trackers"} - states.keys()
    if missing:
        raise SeedError(f"saved generator states lack {', '.join(sorted(missing))}")
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    # The tracker keeps and writes to the dictionary it is given; a copy leaves `states` as they were saved.
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(states["trackers"]))
