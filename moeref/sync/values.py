"""The parts of a weight update: its description, its buckets, and the receipt of what an engine received."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import xxhash

Named = tuple[str, torch.Tensor]
Kind = Literal["full", "delta"]
Drafts = Literal["none", "sent", "kept"]


class SyncError(RuntimeError):
    """A weight update did not happen as asked."""


class Refused(SyncError):
    """A call was refused before it changed anything."""


@dataclass(frozen=True)
class Update:
    """A weight update: `version` names the weights that the engine has after it.

    `full` replaces all weights. `delta` holds what differs from version `base`: whole tensors, or messages of
    `moeref.delta`. Both are new values and not differences, so that sending one twice changes nothing.
    `drafts`, of weights of drafts (MTP layers, EAGLE): they are `sent` too, `kept` as the engine has them, or there
    are `none` in either model. `id` tells updates of two trainers apart; a retry keeps it.

    Raises ValueError for a version that is no int or below 0, an unknown kind or drafts, or a base that does not fit.
    """

    version: int
    kind: Kind = "full"
    base: int | None = None
    drafts: Drafts = "none"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if type(self.version) is not int or type(self.base) not in (int, type(None)):  # True and 1.0 equal 1
            raise ValueError(f"version and base of an update are ints: {self}")
        if self.version < 0:
            raise ValueError(f"version={self.version} of an update must be at least 0")
        for name, choices in (("kind", get_args(Kind)), ("drafts", get_args(Drafts))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} of an update is none of {', '.join(choices)}")
        fits = self.base is None if self.kind == "full" else self.base is not None and 0 <= self.base < self.version
        if not fits:
            raise ValueError(f"a delta needs the earlier version that it changes, a full update has none: {self}")


@dataclass(frozen=True)
class Bucket:
    """A part of an update, as an engine gets it: tensors under their Hugging Face names, anywhere in memory.

    A `moeref.exporter.Bucket` is one memory in which tensors of any stream lie side by side; it knows of no update.
    `index` counts from 0, `last` ends the update, and `checksum` is what the function of that name gives.
    """

    index: int
    tensors: tuple[Named, ...]
    last: bool
    checksum: str

    @classmethod
    def of(cls, index: int, tensors: Iterable[Named], last: bool) -> Bucket:
        """Make a bucket and its checksum, which waits for the kernels that write the tensors."""
        tensors = tuple(tensors)
        return cls(index, tensors, last, checksum(tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors)


@dataclass(frozen=True)
class Receipt:
    """How much of an update was received, or sent. `digest` is a hash over the checksums of all buckets, in order."""

    version: int
    buckets: int = 0
    tensors: int = 0
    nbytes: int = 0
    digest: str = ""

    def plus(self, bucket: Bucket) -> Receipt:
        """This receipt with one more bucket."""
        digest = xxhash.xxh3_64_hexdigest(f"{self.digest}{bucket.index}{bucket.last}{bucket.checksum}".encode())
        count, nbytes = self.tensors + len(bucket.tensors), self.nbytes + bucket.nbytes
        return Receipt(self.version, self.buckets + 1, count, nbytes, digest)


def checksum(tensors: Iterable[Named]) -> str:
    """The XXH3 (64 bits, hexadecimal) of name, dtype, shape and bytes of all tensors; the same on every device."""
    state = xxhash.xxh3_64()
    for name, tensor in tensors:
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return state.hexdigest()
