"""Versions of small weights between which the facet `delta` goes, and in which order deltas are made, applied and lost.

Values are bits, so that NaN with different payloads, infinities, zeros of both signs and denormals are among them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeref_conformance.contract.api import Cell

Bits = npt.NDArray[np.int16] | npt.NDArray[np.int32]
Weights = dict[str, torch.Tensor]
#: Name, dtype and shape. One has more elements than 16 bits can count, and than the 2^18 of a piece of half a MiB; one
#: is a scalar, one stays fp32 beside bf16. Two experts are alike, and sorted as text they are in another order than by
#: number.
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "model.embed_tokens.weight": (torch.bfloat16, (33, 10_001)),
    "model.layers.0.mlp.gate.e_score_correction_bias": (torch.float32, (16,)),
    "model.layers.0.mlp.experts.11.down_proj.weight": (torch.bfloat16, (24, 17)),
    "model.norm.weight": (torch.bfloat16, (257,)),
    "model.layers.0.mlp.experts.11.down_proj.input_scale": (torch.float32, ()),
    "model.layers.0.mlp.experts.2.down_proj.weight": (torch.bfloat16, (24, 17)),
}
LARGEST = next(iter(TENSORS))
#: The upper 16 bits of zeros, infinities, NaN with several payloads, the smallest denormal, and one.
SPECIAL = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x0001, 0x3F80)
#: Where a count in 16 bits, or an offset of one, goes wrong.
EDGES = (0, 65_535, 65_536, -1)


@dataclass(frozen=True)
class Script:
    """What happens between a sender and a receiver that both hold version `start`, in order.

    `make` a delta to a version, `apply` it, tell the sender of the receipt (`acknowledge`). What is made and never
    applied is lost.
    """

    start: int
    actions: tuple[tuple[str, int], ...]


def _once(version: int) -> Script:
    return Script(version - 1, (("make", version), ("apply", version)))


#: By what changes from the version before: to 1, 2, 3 …
CHANGES = ("1 %", "nothing", "half", "all", "special values", "special values turned", "first, last and 2^16", "10 %")
#: Version 11 is made of version 9, so that what 10 changed is not in a delta from 9 to 11.
PREDECESSORS = {9: 8, 10: 9, 11: 9, 12: 10}
#: The version in which the last element of each tensor changed, further from the one before than 16 bits can count.
LAST = 13
#: The version in which each tensor changed by another share, and some not at all.
UNEVEN = 14
#: Those shares, in the order of `TENSORS`.
SHARES = (0.01, 1.0, 0.0, 0.5, 0.0, 1.0)

#: Versions whose bytes are sent as another dtype too, by what changes in them: low bytes, signs of zeros, and the last
#: elements. Weights in INT4 are packed into int32, and have their shapes in int64.
IN_OTHER_DTYPES = {
    "in FP8": (1, torch.float8_e4m3fn),
    "in FP8, signs of zeros": (6, torch.float8_e4m3fn),
    "in FP8, the last element": (LAST, torch.float8_e4m3fn),
    "in int32": (1, torch.int32),
    "in int64": (1, torch.int64),
}

DENSITIES = {f"{change} changed": _once(version) for version, change in enumerate(CHANGES, 1)}
DENSITIES["the last element changed"] = _once(LAST)
DENSITIES["some tensors changed"] = _once(UNEVEN)
SKIPPED = {
    "a delta that is lost": Script(
        7, (("make", 8), ("make", 9), ("apply", 9), ("acknowledge", 9), ("make", 10), ("apply", 10))
    ),
    "a receipt that comes late": Script(
        9, (("make", 10), ("apply", 10), ("make", 11), ("acknowledge", 10), ("make", 12), ("apply", 12))
    ),
    "a delta that comes after the next was made": Script(
        7, (("make", 8), ("make", 9), ("apply", 8), ("acknowledge", 8), ("make", 10), ("apply", 10))
    ),
    "a step that changes nothing, and the next": Script(
        1, (("make", 2), ("apply", 2), ("acknowledge", 2), ("make", 3), ("apply", 3))
    ),
    "a receipt that comes again after the next one": Script(
        7,
        (
            *(("make", 8), ("apply", 8), ("acknowledge", 8), ("make", 9), ("apply", 9), ("acknowledge", 9)),
            *(("acknowledge", 8), ("make", 10), ("apply", 10)),
        ),
    ),
}
TWICE = {
    "applied twice": Script(0, (("make", 1), ("apply", 1), ("apply", 1))),
    "acknowledged twice": Script(
        7, (("make", 8), ("apply", 8), ("acknowledge", 8), ("apply", 8), ("acknowledge", 8), ("make", 9), ("apply", 9))
    ),
}
OTHER_BASE = {
    "a delta that was overtaken": Script(7, (("make", 8), ("make", 9), ("apply", 9), ("apply", 8))),
    "a receiver that is ahead": Script(9, (("make", 10), ("apply", 10), ("make", 11), ("apply", 11))),
    "a receiver that is behind": Script(7, (("make", 8), ("acknowledged unseen", 8), ("make", 9), ("apply", 9))),
}
SCRIPTS = {**DENSITIES, **SKIPPED, **TWICE, **OTHER_BASE}


def versions(cell: Cell) -> list[Weights]:
    """The weights of every version. Each cell has other values."""
    random = np.random.default_rng(zlib.crc32(cell.id.encode()))
    first = {name: _drawn(random, dtype, shape) for name, (dtype, shape) in TENSORS.items()}
    found = [first]

    def add(change: Callable[[Bits], Bits], of: int = -1) -> None:
        found.append({name: change(bits.copy()) for name, bits in found[of].items()})

    for share in (0.01, 0.0, 0.5, 1.0):
        add(lambda bits, share=share: _changed(random, bits, share))  # type: ignore[misc]
    add(lambda bits: _with_specials(bits, SPECIAL))
    add(lambda bits: _with_specials(bits, (*SPECIAL[1:], SPECIAL[0])))
    add(lambda bits: _flipped(bits, EDGES))
    add(lambda bits: _changed(random, bits, 0.1))
    for of in PREDECESSORS.values():
        add(lambda bits: _changed(random, bits, 0.1), of)
    add(lambda bits: _flipped(bits, EDGES[-1:]))
    uneven = zip(found[-1].items(), SHARES, strict=True)
    found.append({name: _changed(random, bits.copy(), share) for (name, bits), share in uneven})
    return [{name: _tensor(name, bits) for name, bits in weights.items()} for weights in found]


def in_dtype(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weights:
    """The bytes of each tensor as numbers of `dtype`, as many as are whole but the last, and none without a number.

    Of FP8 they are an odd number, as no wider dtype has.
    """
    held = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in weights.items()}
    counts = {name: (len(of) - 1) // dtype.itemsize for name, of in held.items()}
    return {name: held[name][: count * dtype.itemsize].view(dtype) for name, count in counts.items() if count}


def digests(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Dtype, shape and a hash of the bytes of every tensor, as records have them."""

    def digest(tensor: torch.Tensor) -> str:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"

    return {name: digest(tensor) for name, tensor in weights.items()}


def _drawn(random: np.random.Generator, dtype: torch.dtype, shape: Sequence[int]) -> Bits:
    kind: type[np.int16 | np.int32] = np.int16 if dtype.itemsize == 2 else np.int32
    limits = np.iinfo(kind)
    return np.asarray(random.integers(limits.min, limits.max, shape, kind, endpoint=True))


def _changed(random: np.random.Generator, bits: Bits, share: float) -> Bits:
    """`share` of the elements, and at least one if any, with some of their lowest 8 bits flipped."""
    count = bits.size if share == 1.0 else -int(-share * bits.size // 1)
    where = random.permutation(bits.size)[:count]
    bits.reshape(-1)[where] ^= random.integers(1, 255, count).astype(bits.dtype)
    return bits


def _with_specials(bits: Bits, values: Sequence[int]) -> Bits:
    """The first elements replaced by `values`."""
    count, shift = min(bits.size, len(values)), 8 * bits.itemsize - 16
    unsigned = bits.reshape(-1).view(f"u{bits.itemsize}")
    unsigned[:count] = np.array(values[:count], unsigned.dtype) << shift
    return bits


def _flipped(bits: Bits, edges: Sequence[int]) -> Bits:
    """The elements at `edges` with two bits flipped."""
    for edge in edges:
        if edge < bits.size:
            bits.reshape(-1)[edge] ^= 5
    return bits


def _tensor(name: str, bits: Bits) -> torch.Tensor:
    dtype, shape = TENSORS[name]
    return torch.from_numpy(bits.reshape(-1)).view(dtype).reshape(shape)
