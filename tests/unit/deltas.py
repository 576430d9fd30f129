"""Two versions of a small set of tensors, and deltas whose descriptions are changed under right checksums."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

from moeref.delta import Delta, State

Tensors = dict[str, torch.Tensor]
INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as integers: NaN and -0 compare by their bits."""
    return tensor.reshape(-1).view(INT[tensor.dtype.itemsize])


def same(a: Tensors, b: Tensors) -> bool:
    """Whether two sets of tensors agree bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


def copy(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit patterns, so NaN, infinities and subnormals too."""
    made = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(made).view(dtype).reshape(shape)


def changed(tensor: torch.Tensor, density: float, seed: int) -> torch.Tensor:
    """Another tensor, of which this share of the elements has other bits."""
    new, rng = tensor.clone(), np.random.default_rng(seed)
    flat = bits(new).numpy()
    where = rng.choice(flat.size, round(flat.size * density), replace=False)
    flat[where] ^= rng.integers(1, 4, where.size).astype(flat.dtype)
    return new


def versions(densities: dict[str, float]) -> tuple[Tensors, Tensors]:
    """A bf16 tensor of 300 × 700 for each name, in two versions that differ at these densities."""
    base = {name: random((300, 700), torch.bfloat16, seed) for seed, name in enumerate(densities)}
    return base, {name: changed(base[name], density, 9) for name, density in densities.items()}


def messages(base: Tensors, new: Tensors, **options: Any) -> list[bytes]:
    """The delta from version 1 to 2."""
    return list(Delta(State.of(1, base.items()), base, new.items(), 2, **options))


Change = Callable[[int, dict[str, Any], bytes], tuple[dict[str, Any], bytes] | None]


def rewritten(whole: list[bytes], change: Change) -> list[bytes]:
    """A delta without zstd whose (number, description, body) are changed, None: left out, with the right checksums."""
    made, before = [], 0
    for number, message in enumerate(whole):
        _, described, body = struct.unpack("<8sIQ", message[:20])
        fields = json.loads(message[20 : 20 + described])
        new = change(number, fields, message[20 + described : 20 + described + body])
        if new is None:
            continue
        text = json.dumps(new[0]).encode()
        front = struct.pack("<8sIQ", b"moerefD1", len(text), len(new[1])) + text + new[1]
        before = xxhash.xxh3_64_intdigest(front, before)
        made.append(front + struct.pack("<Q", before))
    return made
