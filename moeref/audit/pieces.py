"""What happened to a tensor that is made of pieces: experts in one tensor, or shards of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash

from moeref.torch_dtypes import bits_of

#: What happened to a tensor: its kind, and a sentence.
Cause = tuple[str, str]
#: The most shards that are looked for.
MOST = 64


def experts(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    """The cause if experts along dimension 0 are all expected ones, but in other places; else None."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return None
    was, now = _hashes(expected, len(expected), 0), _hashes(found, len(found), 0)
    if not set(now) <= set(was):
        return None
    moved = [(expert, was.index(one)) for expert, one in enumerate(now) if one != was[expert]]
    (first, other), many = moved[0], f"{len(moved)} of its {len(now)} experts"
    return "expert", f"{many} hold those of others: expert {first} holds the values of expert {other}"


def alone(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    """The cause if one rank's shard stands alone where all are expected, or is repeated in place of all; else None."""
    if expected.ndim != found.ndim or expected.dtype != found.dtype:
        return None
    dims = [dim for dim in range(found.ndim) if expected.shape[dim] != found.shape[dim]]
    if not dims:
        return _repeated(expected, found)
    if len(dims) > 1 or not found.numel():
        return None
    parts, rest = divmod(expected.shape[dims[0]], found.shape[dims[0]])
    if rest or not 1 < parts <= MOST:
        return None
    shards = _hashes(expected, parts, dims[0])
    (held,) = _hashes(found, 1, 0)
    if held not in shards:
        return None
    return "shard", f"it is shard {shards.index(held)} of {parts} along dimension {dims[0]}, without the others"


def _repeated(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    for dim, parts in _cuts(found):
        first, second = (found.narrow(dim, at, 1) for at in (0, found.shape[dim] // parts))
        if (bits_of(first) != bits_of(second)).any():  # most are not, and hashing them all takes long
            continue
        held = _hashes(found, parts, dim)
        if len(set(held)) == 1 and held[0] in (shards := _hashes(expected, parts, dim)):
            return "shard", f"shard {shards.index(held[0])} of {parts} along dimension {dim} is there {parts} times"
    return None


def order(expected: torch.Tensor, found: torch.Tensor) -> Cause | None:
    """The cause if the shards of ranks are in another order, by the largest shards that show it; else None."""
    for dim, parts in _cuts(found):
        if sorted(_hashes(expected, parts, dim)) == sorted(_hashes(found, parts, dim)):
            return "shards", f"its {parts} shards along dimension {dim} are in another order"
    return None


def _cuts(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(dimension, number of equal shards), the fewest first."""
    for parts in range(2, MOST + 1):
        for dim, size in enumerate(tensor.shape):
            if size % parts == 0 and size > parts:
                yield dim, parts


def _hashes(tensor: torch.Tensor, parts: int, dim: int) -> list[bytes]:
    """A hash of the bytes of each of `parts` equal shards."""
    shards = tensor.chunk(parts, dim)
    return [xxhash.xxh3_128_digest(bits_of(shard.contiguous())) for shard in shards]
