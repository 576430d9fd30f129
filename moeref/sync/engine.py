"""What an inference engine offers to a weight update, and the half of the update that is the engine's to check.

An engine that writes buckets into the weights that it serves has torn weights until it commits. So one rule holds for
all engines: `resume` raises while an update is begun.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from moeref.sync.values import Bucket, Receipt, Refused, SyncError, Update


class Engine(Protocol):
    """An inference engine, or all replicas of one. Calls come one at a time, in the order of the methods below.

    A call that raises Refused has changed nothing, and one that raises TimeoutError may still act. Calls come from
    threads of their own, on the caller's CUDA device, unless their time-out is None.
    """

    @property
    def drafts(self) -> bool:
        """Whether it holds weights of drafts (MTP layers, EAGLE)."""

    @property
    def caches(self) -> frozenset[str]:
        """What `reset_caches` must reset, since it holds results of old weights: `prefix`, `encoder` and so on."""

    def version(self) -> int:
        """The version of the last commit, or of the weights that it started with; -1 if sleep has dropped the weights.

        It stamps tokens with the same.
        """

    def receipt(self) -> Receipt | None:
        """The receipt of the last commit; None if there was none."""

    def pause(self) -> None:
        """Generate no more tokens. Raises Refused if an update has paused it already."""

    def begin(self, update: Update) -> None:
        """Expect the buckets of `update`, from index 0. Repeats one that was begun with the same id.

        Raises Refused if another is begun, or for a version or base that does not fit.
        """

    def send(self, bucket: Bucket) -> Receipt:
        """Take a bucket; return what was received since `begin`. Raises SyncError for one that is not the next."""

    def commit(self, version: int) -> Receipt:
        """Finalise the weights that came, once for all buckets; return what `receipt` returns from now on.

        Raises SyncError without the last bucket, if nothing is begun, or if the model has a tensor that neither a full
        update brought nor `drafts="kept"` excuses.
        """

    def reset_caches(self) -> frozenset[str]:
        """Drop what was computed with old weights; return the names of what was really dropped."""

    def resume(self) -> None:
        """Generate again, if it is paused. Raises SyncError while an update is begun."""


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
        """Forget a begun update, if there is one; the weights are those of `version()`. Raises SyncError if not."""


class Intake:
    """The engine's side of an update: what may begin, which bucket is next, and when it may be committed.

    For authors of engines. `accept` comes before a bucket touches the weights, `commit` after the weights are final.
    """

    def __init__(self, version: int = 0, *, drafts: bool = False) -> None:
        self.version, self.drafts = version, drafts
        self.receipt: Receipt | None = None
        self.update: Update | None = None
        self._received = Receipt(version)
        self._complete = False

    def begin(self, update: Update) -> None:
        """Raises Refused if the update does not fit this engine, or another is begun."""
        if self.update is not None and self.update.id != update.id:
            raise Refused(f"version {update.version}: the update to version {self.update.version} is not finished")
        check(update, self.version, drafts=self.drafts)
        self.update, self._received, self._complete = update, Receipt(update.version), False

    def accept(self, bucket: Bucket) -> Receipt:
        """Raises SyncError for a bucket that is lost, repeated, out of order, changed or without a begun update."""
        done = self._received
        if self.update is None or self._complete:
            raise SyncError(f"bucket {bucket.index}: no update is begun, or its last bucket is here")
        if bucket.index != done.buckets:
            raise SyncError(f"bucket {bucket.index} came, {done.buckets} was expected: lost, repeated or reordered")
        if (found := Bucket.of(bucket.index, bucket.tensors, bucket.last).checksum) != bucket.checksum:
            raise SyncError(f"bucket {bucket.index}: checksum {found} of what came, {bucket.checksum} of what was sent")
        self._received, self._complete = done.plus(bucket), bucket.last
        return self._received

    @property
    def received(self) -> Receipt:
        """What came of the update since `begin`."""
        return self._received

    def commit(self, version: int) -> Receipt:
        """The update is finished. Raises SyncError if it is not complete, or of another version."""
        self.complete(version)
        self.version, self.receipt, self.update = version, self._received, None
        return self._received

    def complete(self, version: int) -> None:
        """Raises SyncError unless all buckets of the update to `version` are here: call it before finalising."""
        if self.update is None or self.update.version != version:
            raise SyncError(f"version {version} is not the update that is begun: {self.update}")
        if not self._complete:
            raise SyncError(f"version {version}: the last bucket did not come; {self._received.buckets} did")

    def forget(self) -> None:
        """The begun update is reverted."""
        self.update = None

    def drop(self) -> None:
        """The weights are gone, as in a sleep that keeps none: the version is -1, and every update is sent."""
        self.version, self.receipt = -1, None


def check(update: Update, version: int, *, drafts: bool) -> None:
    """Raises Refused for an update that does not fit an engine at `version` with or without `drafts`."""
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
