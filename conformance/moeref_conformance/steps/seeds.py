"""Facet `seeds`: what is planned, what the generators hold after seeding, and what a resumed run draws."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Seeds
from moeref_conformance.contract.requests.seeds import BAD, OTHER, SEED, WAYS
from moeref_conformance.steps.facet import Context, Facet, Static, Step, refusal


def planned(seeds: Seeds, context: Context) -> dict[str, Any]:
    """The seeds of the context's rank, both ways and of another seed; the refusal of each bad one, None if taken."""
    rank = context.rank
    plans: dict[str, Any] = {way: dict(seeds.planned(rank, SEED, per_dp)) for way, per_dp in WAYS.items()}
    plans["other"] = dict(seeds.planned(rank, OTHER, False))
    return {**plans, "refused": {repr(bad): refusal(seeds.planned, rank, bad, False) for bad in BAD}}


def installed(seeds: Seeds, context: Context) -> dict[str, Any]:
    """Digests of all generator states after seeding, both ways and with another seed, and of megatron-core's own."""
    value: dict[str, Any] = {}
    for way, per_dp in WAYS.items():
        # Building the model may have left the very seeds that are asked for.
        value["spoiled"] = seeded(SEED + 1)
        seeds.install(SEED, per_dp)
        value[way] = states()
    seeds.install(OTHER, False)
    value["other"] = states()
    value["refused"] = {repr(bad): refusal(seeds.install, bad, False) for bad in BAD}
    value["megatron"] = {way: _megatron(per_dp) for way, per_dp in WAYS.items()}
    return value


def resumed(seeds: Seeds, context: Context) -> dict[str, list[Any]]:
    """Draws after a save, then after each of two restores of the same states.

    A run that is saved has drawn before: replicas have other tokens, and drew for them, not all the same number.
    """
    seeds.install(SEED, False)
    for _ in range(1 + topology.coords(context.cell.layout, context.rank)["dp"]):
        _draws()
    saved = seeds.save()
    draws = {"went on": _draws()}
    for turn in ("resumed", "resumed again"):
        seeds.restore(saved)
        draws[turn] = _draws()
    return draws


def _trackers() -> dict[str, str]:
    """Megatron's trackers by the kit's names."""
    from megatron.core.tensor_parallel import random as megatron_random

    return {
        "tp": megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME,
        "expert": megatron_random._EXPERT_PARALLEL_RNG_TRACKER_NAME,
    }


def states() -> dict[str, str]:
    """A digest of the state of every generator; empty for a tracker that does not exist."""
    from megatron.core.tensor_parallel import random as megatron_random

    kind, keys, *rest = np.random.get_state()
    digests = {
        "python": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(repr((kind, bytes(keys), rest)).encode()),
        "torch": _digest(bytes(torch.get_rng_state().numpy())),
        "cuda": _digest(bytes(torch.cuda.get_rng_state().cpu().numpy())),
    }
    held = megatron_random.get_cuda_rng_tracker().get_states()
    for name, tracker in _trackers().items():
        digests[name] = _digest(bytes(held[tracker].cpu().numpy())) if tracker in held else ""
    return digests


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def seeded(default: int) -> dict[str, str]:
    """Digests of python's, numpy's and torch's generators when seeded with `default`, and megatron-core's own trackers.

    The ranks' coordinates come from megatron-core's process groups. All generators of this process are changed.
    """
    from megatron.core import tensor_parallel

    random.seed(default)
    np.random.seed(default)
    torch.manual_seed(default)
    tensor_parallel.model_parallel_cuda_manual_seed(default)
    return states()


def _megatron(per_dp: bool) -> dict[str, str]:
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank() if per_dp else 0
    return seeded(SEED + 100 * stage + 10 * replica)


def _draws() -> list[float]:
    """One number from every generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    tracker = megatron_random.get_cuda_rng_tracker()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in _trackers().values():
        with tracker.fork(name):
            drawn.append(float(torch.rand((), device=device)))
    return drawn


FACET = Facet(
    name="seeds",
    protocol=Seeds,
    steps=(
        Step(name="seeds_planned", ask=planned, static=Static.EVERY_RANK),
        Step(name="seeds", ask=installed),
        Step(name="seeds_resumed", ask=resumed),
    ),
)
