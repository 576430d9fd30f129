"""Every stage of moeref after a stream, fed with any iterator of (Hugging Face name, tensor), and what comes out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from docs.examples.small_engine import SmallEngine
from moeref import audit, delta
from moeref.exporter import Bucket, SharedBuffer, buckets, read, unit_of
from moeref.sync import WeightSync

Tensors = dict[str, torch.Tensor]
#: Begins a new pass over the weights.
Stream = Callable[[], Iterator[tuple[str, torch.Tensor]]]
#: Small, so that a model of a megabyte fills many buckets.
LIMIT = 64 << 10
#: ROLL sends the experts of some layers rank by rank, so that those of a layer do not come side by side.
UNIT = str if os.environ.get("MOEREF_PEER") == "roll" else unit_of


def copies(stream: Iterator[tuple[str, torch.Tensor]]) -> Tensors:
    """Copied as they come: what they hold later is the stream's own affair."""
    return {name: tensor.clone() for name, tensor in stream}


def own_buckets(stream: Stream) -> Tensors:
    held = list(buckets(stream(), LIMIT, unit=UNIT))
    assert len(held) > 5
    return {name: tensor for bucket in held for name, tensor in bucket.tensors()}


def lent_buckets(stream: Stream) -> Tensors:
    return _each(stream, lambda bucket: copies(bucket.tensors()), lend=True)


def messages(stream: Stream) -> Tensors:
    """Of bytes alone."""
    return _each(stream, lambda bucket: copies(read(bucket.message(3).clone(), 3).tensors()), lend=True)


def shared_memory(stream: Stream) -> Tensors:
    with SharedBuffer(1 << 20) as here, SharedBuffer(name=here.name) as there:

        def moved(bucket: Bucket) -> Tensors:
            here.put(bucket, 1)
            return dict(there.take(1).tensors())

        return _each(stream, moved)


def _each(stream: Stream, take: Callable[[Bucket], Tensors], lend: bool = False) -> Tensors:
    found: Tensors = {}
    for bucket in buckets(stream(), LIMIT, lend=lend, unit=UNIT):
        found |= take(bucket)
    return found


def sync(stream: Stream) -> Tensors:
    """An update of an engine that starts with other weights."""
    engine = SmallEngine({name: torch.zeros_like(tensor) for name, tensor in stream()})
    done = WeightSync(engine, bucket_bytes=LIMIT).update(stream(), 1)
    assert (done.receipt.version, done.receipt.tensors, done.sent) == (1, len(engine.weights), True)
    return engine.weights


class Deltas:
    """A receiver of the weights that a stream has, to be brought to what it has later."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.tensors = stream, copies(stream())
        self._sender, self._receiver = delta.Sender(1, stream()), delta.Receiver(1, self.tensors)

    def follow(self) -> int:
        """Apply the delta to what the stream has now; its bytes."""
        sent = self._sender.delta(2, self._stream(), bucket=LIMIT)
        state = self._receiver.apply(sent)
        self._sender.acknowledge(state.version, state.hash)
        return sum(map(len, sent))


def changed(before: audit.Manifest, stream: Stream) -> set[str]:
    """The tensors that an audit of the stream finds to be others."""
    return {finding.name for finding in audit.compare(before, stream()).findings}


BUCKETS = {stage.__name__: stage for stage in (own_buckets, lent_buckets, messages, shared_memory, sync)}


def differences(found: Tensors, expected: Tensors) -> list[str]:
    """Names of tensors that are not there on both sides, or whose dtype, shape or bytes differ."""
    both = found.keys() & expected.keys()
    return sorted((found.keys() ^ expected.keys()) | {n for n in both if _raw(found[n]) != _raw(expected[n])})


def _raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
