"""Fingerprints of every byte, next to memcpy and a bare hash of the same model, one core. Bar: 4 GB/s."""

from __future__ import annotations

import pytest
import torch
import xxhash
from rich.console import Console

from moeref.audit import Manifest
from moeref.torch_dtypes import bits_of
from tests.bench.test_delta_speed import MODELS, fastest

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("size", MODELS)
def test_rate(size: str) -> None:
    torch.set_num_threads(1)
    tensors, shape = MODELS[size]
    model = {str(i): torch.randn(shape).bfloat16() for i in range(tensors)}
    into, nbytes = {name: torch.empty_like(t) for name, t in model.items()}, sum(t.nbytes for t in model.values())
    found = fastest(
        {
            "memcpy": lambda: [into[name].copy_(tensor) for name, tensor in model.items()],
            "hash": lambda: [xxhash.xxh3_128_digest(bits_of(tensor)) for tensor in model.values()],
            "audit": lambda: Manifest.of(model.items()),
        }
    )
    for name, seconds in found.items():
        each = seconds / tensors * 1e6
        Console(width=120).print(f"{size}: {name:8} {nbytes / seconds / 1e9:6.2f} GB/s, {each:6.1f} µs a tensor")
