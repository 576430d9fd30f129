"""Deltas at 1 % density: rates of encoding and applying in bytes of model, next to memcpy of the same model, one core.

Bars: encode 2 GB/s and 33 × smaller in the fast form, 65 × smaller with zstd, apply 20 GB/s. What is measured takes
turns, and the time is that of this thread's CPU, so that a busy machine slows all alike. Next to them stands what numpy
alone needs for the least that they do: comparing two versions, and writing the changes where they belong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from moeref import delta
from tests.unit import deltas
from tests.unit.test_delta import corrupt

pytestmark = pytest.mark.bench
CONSOLE = Console(width=120)
#: Name -> (tensors, shape): large tensors, and the sizes of small experts.
MODELS = {"large": (48, (1024, 4096)), "small": (6000, (96, 384))}


def fastest(calls: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Seconds of CPU of the fastest of each."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            found[name] = min(found[name], time.thread_time() - began)
    return found


@pytest.mark.parametrize("size", MODELS)
def test_rates_at_one_per_cent(size: str) -> None:
    torch.set_num_threads(1)
    tensors, shape = MODELS[size]
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i // 384}.mlp.experts.{i % 384}.up_proj.weight" for i in range(tensors)]
    base = {name: torch.randn(shape, generator=generator).bfloat16() for name in names}
    new = {name: deltas.changed(tensor, 0.01, i) for i, (name, tensor) in enumerate(base.items())}
    into, state = deltas.copy(base), delta.State.of(1, base.items())
    pairs = [(deltas.bits(base[name]).numpy(), deltas.bits(new[name]).numpy()) for name in names]
    found = [np.flatnonzero(a != b) for a, b in pairs]
    writes = [
        (deltas.bits(into[name]).numpy(), at, b[at]) for name, at, (_, b) in zip(names, found, pairs, strict=True)
    ]
    calls: dict[str, Callable[[], Any]] = {
        "compare words alone": lambda: [a.view(np.int64) != b.view(np.int64) for a, b in pairs],
        "write changes alone": lambda: [flat.put(at, values) for flat, at, values in writes],
        "memcpy": lambda: [into[name].copy_(tensor) for name, tensor in new.items()],
        "hash": lambda: delta.State.of(1, base.items()),
    }
    smaller, nbytes = {}, sum(tensor.nbytes for tensor in base.values())
    for form, zstd in (("fast", False), ("zstd", True)):
        whole = list(delta.Delta(state, base, new.items(), 2, zstd=zstd))
        smaller[form] = round(nbytes / sum(map(len, whole)), 1)
        receiver = delta.Receiver(1, deltas.copy(base))
        calls |= {
            f"{form}: encode": lambda zstd=zstd: list(delta.Delta(state, base, new.items(), 2, zstd=zstd)),
            f"{form}: encode, Sender": lambda zstd=zstd: list(
                delta.Delta(state, base, new.items(), 2, zstd=zstd, trusted=True)
            ),
            f"{form}: check": lambda whole=whole: delta.check(whole, state),
            f"{form}: apply": lambda whole=whole, to=receiver: to.apply(whole, verify=False),
            f"{form}: apply, verify": lambda whole=whole, to=receiver: to.apply(whole),
        }
    CONSOLE.print(f"{size}: {nbytes / 1e6:.0f} MB in {tensors} tensors; smaller by {smaller}")
    for name, seconds in fastest(calls).items():
        each = seconds / tensors * 1e6
        CONSOLE.print(f"  {name:22} {nbytes / seconds / 1e9:6.2f} GB/s of model, {each:6.1f} µs a tensor")
    assert smaller["fast"] >= 33
    assert smaller["zstd"] >= 65


@pytest.mark.parametrize("zstd", [False, True])
def test_100_000_corrupted_deltas_are_refused(zstd: bool) -> None:
    base = {name: deltas.random((5, 131), torch.bfloat16, seed) for seed, name in enumerate("abc")}
    new = {name: deltas.changed(base[name], density, 3) for name, density in (("a", 0.03), ("b", 0.4), ("c", 1))}
    corrupt(base, deltas.messages(base, new, zstd=zstd, bucket=300), times=100_000)
