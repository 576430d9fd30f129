"""What is known of the weights of one version: a version number and a hash of each tensor."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import xxhash

from moeref import torch_dtypes
from moeref.bridge.named import Named, named
from moeref.delta.errors import DeltaError
from moeref.torch_dtypes import dtype_name

#: One for all calls: `json.dumps` makes a new one in each call that names separators.
_COMPACT = json.JSONEncoder(separators=(",", ":"))
Bits = npt.NDArray[Any]


class Fingerprint(NamedTuple):
    """A tensor's dtype as torch names it, its shape, and the XXH3 (64 bits, hexadecimal) of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    hash: str


@dataclass(frozen=True)
class State:
    """A version of the weights, and the fingerprint of each tensor by name."""

    version: int
    tensors: Mapping[str, Fingerprint]

    @classmethod
    def of(cls, version: int, stream: Iterable[Named]) -> State:
        """The state of a stream of (name, tensor); reads every byte once. DeltaError for a name that comes twice."""
        tensors: dict[str, Fingerprint] = {}
        for name, tensor in named(stream):
            if name in tensors:
                raise DeltaError(f"{name} comes twice in the stream")
            bits = bits_of(name, tensor)
            tensors[name] = Fingerprint(dtype_name(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_64_hexdigest(bits))
        return cls(version, tensors)

    @cached_property
    def hash(self) -> str:
        """XXH3 (128 bits, hexadecimal) of a JSON line [name, dtype, shape, hash] for each tensor, sorted by name."""
        digest = xxhash.xxh3_128()
        for name in sorted(self.tensors):
            dtype, shape, hash_ = self.tensors[name]
            digest.update(f'{_front(name, dtype, shape)},"{hash_}"]\n'.encode())
        return digest.hexdigest()

    def after(self, version: int, hashes: Mapping[str, str]) -> State:
        """The state of `version`, in which the tensors of `hashes` have these and all others are as they are here."""
        changed = {name: Fingerprint(*self.tensors[name][:2], new) for name, new in hashes.items()}
        return State(version, {**self.tensors, **changed})


@functools.lru_cache(maxsize=1 << 16)
def _front(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """The JSON line of a tensor up to its hash. It is kept, as each version needs it again."""
    return _COMPACT.encode([name, dtype, shape])[:-1]


def bits_of(name: str, tensor: torch.Tensor) -> Bits:
    """The elements as flat integers. Raises DeltaError for a tensor whose elements cannot be read so."""
    try:
        return torch_dtypes.bits_of(tensor)
    except TypeError as error:
        raise DeltaError(f"{name}: {error}") from None
