"""The calls that a weight update makes on an inference engine, and the engine's own checks of them.

An engine that writes buckets into the weights that it serves has torn weights, partly old, until it commits. So
`resume` of every engine raises while an update is begun and not finished.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from moeref.sync.values import Bucket, Receipt, Refused, SyncError, Update


class Engine(Protocol):
    """An inference engine, or all replicas of one. Calls come one at a time, in the order of the methods below.

    A call that raises Refused has changed nothing, and one that raises TimeoutError may still act. Each call
    runs in a thread of its own, on the caller's CUDA device, unless its time-out is None; gradients are off in both.
    """

    @property
    def drafts(self) -> bool:
        """Whether the engine holds weights of drafts (MTP layers, EAGLE)."""

    @property
    def caches(self) -> frozenset[str]:
        """The caches that hold results of weights, for `reset_caches` to reset: `prefix`, `encoder` and so on."""

    def version(self) -> int:
        """The version of the last commit, or the one it started with; -1 if a sleep has dropped the weights.

        The engine stamps tokens with this version.
        """

    def receipt(self) -> Receipt | None:
        """The receipt of the last commit; None if there was none."""

    def pause(self) -> None:
        """Stop generating tokens. Raises Refused if an update has paused the engine already."""

    def begin(self, update: Update) -> None:
        """Expect the buckets of `update`, from index 0. An update with the id of the begun one starts again.

        Raises Refused if another update is begun, or if version or base do not fit the engine's.
        """

    def send(self, bucket: Bucket) -> Receipt:
        """Take a bucket; return what was received since `begin`. Raises SyncError for any but the next."""

    def commit(self, version: int) -> Receipt:
        """Finalise the weights that came, once for all buckets; return what `receipt` returns from now on.

        Raises SyncError if the last bucket did not come, if no update is begun, or if a full update left out a tensor
        of the model; drafts may be left out with `drafts="kept"`.
        """

    def reset_caches(self) -> frozenset[str]:
        """Drop what was computed with old weights; return the names of the caches that were dropped."""

    def resume(self) -> None:
        """Generate tokens again, if paused. Raises SyncError while an update is begun."""


@runtime_checkable
class Colocated(Engine, Protocol):
    """An engine that sleeps on the trainer's devices: weights and KV cache take memory only when they are awake."""

    def wake_weights(self) -> None:
        """Allocate the weights. Does nothing if they are awake."""

    def wake_kv(self) -> None:
        """Allocate the KV cache. Does nothing if it is awake."""


@runtime_checkable
class Reverting(Engine, Protocol):
    """An engine that keeps its old weights until it commits."""

    def revert(self) -> None:
        """Drop the begun update, if any. Raises SyncError if the weights are then not those of `version()`."""


class Intake:
    """The engine's checks of an update: whether it may begin, which bucket is next, and whether it may be committed.

    An engine calls `accept` before a bucket touches the weights, and `commit` after the weights are final.
    """

    def __init__(self, version: int = 0, *, drafts: bool = False) -> None:
        self.version, self.drafts = version, drafts
        self.receipt: Receipt | None = None
        self.update: Update | None = None
        self._received = Receipt(version)
        self._complete = False

    def begin(self, update: Update) -> None:
        """Begin an update, or begin it again. Raises Refused if it does not fit this engine or another is begun."""
        if self.update is not None and self.update.id != update.id:
            raise Refused(f"version {update.version}: the update to version {self.update.version} is not finished")
        check(update, self.version, drafts=self.drafts)
        self.update, self._received, self._complete = update, Receipt(update.version), False

    def accept(self, bucket: Bucket) -> Receipt:
        """Check and count a bucket; return what came since `begin`.

        Raises SyncError for a bucket that is not the next one or was changed, and if no update is begun.
        """
        received = self._received
        if self.update is None or self._complete:
            raise SyncError(f"bucket {bucket.index}: no update is begun, or its last bucket is here")
        if bucket.index != received.buckets:
            raise SyncError(f"bucket {bucket.index} came, {received.buckets} was expected: lost, repeated or reordered")
        if (computed := Bucket.of(bucket.index, bucket.tensors, bucket.last).checksum) != bucket.checksum:
            raise SyncError(
                f"bucket {bucket.index}: checksum {computed} of what came, {bucket.checksum} of what was sent"
            )
        self._received, self._complete = received.plus(bucket), bucket.last
        return self._received

    @property
    def received(self) -> Receipt:
        """The receipt of what came since `begin`."""
        return self._received

    def commit(self, version: int) -> Receipt:
        """Note that the update is finished. Raises SyncError if it is not complete, or of another version."""
        self.complete(version)
        self.version, self.receipt, self.update = version, self._received, None
        return self._received

    def complete(self, version: int) -> None:
        """Raise SyncError unless all buckets of the update to `version` came: call it before finalising the weights."""
        if self.update is None or self.update.version != version:
            raise SyncError(f"version {version} is not the update that is begun: {self.update}")
        if not self._complete:
            raise SyncError(f"version {version}: the last bucket did not come; {self._received.buckets} did")

    def forget(self) -> None:
        """Drop the begun update, which the engine has reverted."""
        self.update = None

    def drop(self) -> None:
        """Note that the weights are gone, as in a sleep that keeps none: the version is -1, and any update is sent."""
        self.version, self.receipt = -1, None


def check(update: Update, version: int, *, drafts: bool) -> None:
    """Raise Refused if an update does not fit an engine at `version`; drafts: whether that engine has drafts."""
    if update.version <= version:
        raise Refused(f"version {update.version} is not after {version}, which the engine has")
    if update.base is not None and update.base != version:
        raise Refused(f"version {update.version} is a delta to version {update.base}, and the engine has {version}")
    if version < 0 and update.drafts == "kept":
        raise Refused("drafts='kept', and sleep has dropped all weights, drafts included: send them too")
    if drafts and update.drafts == "none":
        raise Refused("the engine has drafts (MTP, EAGLE): send their weights (drafts='sent') or say drafts='kept'")
    if not drafts and update.drafts != "none":
        raise Refused(f"drafts={update.drafts!r}, and the engine has no drafts: it would drop or misplace them")
