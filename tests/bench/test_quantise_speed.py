"""FP8 in blocks in bytes of bf16, next to memcpy of the same tensors and to the casts alone, one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from moeref.exporter.quantise import quantise
from tests.bench.test_delta_speed import fastest

pytestmark = pytest.mark.bench
CONSOLE = Console(width=120)
#: Name -> (tensors, shape): a dense MLP and a latent of DeepSeek-V3, experts of Qwen3-30B-A3B.
MODELS = {"large": (2, (18432, 7168)), "odd": (16, (576, 7168)), "experts": (64, (768, 2048))}


@pytest.mark.parametrize("size", MODELS)
def test_rates_of_fp8_in_blocks(size: str) -> None:
    torch.set_num_threads(1)
    number, shape = MODELS[size]
    tensors = [torch.randn(shape).bfloat16() for _ in range(number)]
    into = [torch.empty_like(tensor) for tensor in tensors]
    calls: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: [out.copy_(tensor) for out, tensor in zip(into, tensors, strict=True)],
        "casts alone": lambda: [tensor.float().to(torch.float8_e4m3fn) for tensor in tensors],
        "quantise": lambda: [quantise("weight", tensor, (128, 128)) for tensor in tensors],
    }
    nbytes = sum(tensor.nbytes for tensor in tensors)
    for name, seconds in fastest(calls, rounds=5).items():
        CONSOLE.print(f"{size:8} {name:12} {nbytes / seconds / 1e9:6.2f} GB/s of bf16")
