"""A weight update as a transaction: afterwards the engine serves the new weights, or the old ones, or is dead.

These rules keep out bugs that weight updates have had in practice (each with its issue or pull request):

- Whatever fails, the engine is resumed or declared dead, with the reason (SkyRL#1212).
- An engine with torn weights is never resumed: only `commit` or `revert` ends a begun update.
- One commit finalises all buckets, and only after the last one (SkyRL#1737, verl#5235).
- The engine counts and checksums what it received, and both sides compare: it is an error if nothing was sent, or if a
  bucket is lost, repeated, reordered or cut (tokenspeed#1373). Names travel with their tensors, so no two lists can
  differ in order (SkyRL#1581).
- The version is the engine's own, and it rises with the commit (TRL#5932). A version names one set of weights.
- Every cache that the engine names is reset before it resumes; one that was not reset is an error (verl#6522,
  SkyRL#1824).
- A delta names its base, and an engine at another version refuses it (astraflow#9); it holds values, not differences,
  so that sending it twice changes nothing. Names are Hugging Face's, whatever the trainer's layout.
- Two updates at once are refused (verl#5698); so is one that leaves drafts behind, or sends them to an engine without
  drafts (verl#6661, NeMo-RL#3619).
- A call that has not returned may still act, so a time-out declares the engine dead instead of going on.
- A bucket's checksum waits for the kernels that make its tensors, and its memory is not used again (verl#7083,
  verl#7987).

What an engine does with tensors that it has received correctly is not checked here: memory that CUDA graphs hold
(vLLM#48251), experts that were moved (vLLM#55228), drafts that are finalised though no tensor came (miles#1926).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch

from moeref import exporter
from moeref.exporter import buckets
from moeref.sync.engine import Colocated, Engine, Reverting, check
from moeref.sync.states import State, Timeouts, may_follow
from moeref.sync.values import Bucket, Drafts, Kind, Named, Receipt, Refused, SyncError, Update

T = TypeVar("T")
Source = Iterable[Named] | Callable[[], Iterable[Named]]


class UpdateFailed(SyncError):
    """The update failed; the engine serves the version that it had."""


class EngineDead(SyncError):
    """The engine cannot be resumed, for the reason in the message: end and restart it."""


@dataclass(frozen=True)
class Synced:
    """An update that succeeded. `sent` is False if the engine had these weights already; `seconds` is by stage."""

    receipt: Receipt
    attempts: int
    sent: bool
    seconds: dict[str, float]


class WeightSync:
    """The weight updates of one engine. `state` and `reason` may be read from any thread.

    `colocated`: the engine sleeps on the trainer's devices; its weights are woken before they are sent, its KV cache
    after. `attempts`: how often an update is tried before it fails. `bucket_bytes`: see `moeref.exporter.buckets`; two
    buckets are alive at a time.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        colocated: bool = False,
        attempts: int = 1,
        bucket_bytes: int = 1 << 30,
        timeouts: Timeouts | None = None,
    ) -> None:
        if colocated and not isinstance(engine, Colocated):
            raise TypeError(f"{type(engine).__name__} has no wake_weights and wake_kv, which a colocated engine needs")
        if attempts < 1:
            raise ValueError(f"attempts={attempts} must be at least 1")
        self.engine, self.colocated, self.attempts = engine, colocated, attempts
        self.bucket_bytes, self.timeouts = bucket_bytes, timeouts or Timeouts()
        self.state, self.reason = State.SERVING, ""
        self._one, self._moving = threading.Lock(), threading.Lock()
        self._seconds: dict[str, float] = {}

    @torch.no_grad()
    def update(
        self, tensors: Source, version: int, *, kind: Kind = "full", base: int | None = None, drafts: Drafts = "none"
    ) -> Synced:
        """Give the engine `tensors`, as its weights of `version`.

        tensors: (Hugging Face name, tensor) of any trainer, or a function that returns them; more than one attempt
        needs what can be iterated again. Only one rank calls this; if iterating is a collective, such as an export, the
        other ranks iterate theirs. Repeating an update is safe: weights that the engine has are compared and not sent.

        Raises Refused if nothing was changed, UpdateFailed if the engine serves the version that it had, EngineDead if
        it cannot be resumed.
        """
        update = Update(version, kind, base, drafts)
        if self.attempts > 1 and isinstance(tensors, Iterator):
            raise Refused("an iterator can be sent once; more attempts need a list, or a function that makes iterators")
        if not self._one.acquire(blocking=False):
            raise Refused(f"version {version}: another update is under way, in state {self.state.value}")
        try:
            return self._run(update, tensors)
        except BaseException as error:
            if self.state in (State.SERVING, State.DEAD):
                raise
            dead = self._die(f"in state {self.state.value}: {error!r}")
            raise (dead if isinstance(error, Exception) else error) from error
        finally:
            self._one.release()

    def _run(self, update: Update, source: Source) -> Synced:
        self._seconds = {}
        had, old = self._query(self.engine.receipt), self._query(self.engine.version)
        if had is not None and had.version == old == update.version:
            return self._repeat(had, source)
        check(update, old, drafts=self.engine.drafts)
        first = self._buckets(source)
        self._pause(old)
        receipt, attempts = self._send_all(update, source, first, self._query(self.engine.version))
        self._finish(update.version)
        return Synced(receipt, attempts, True, self._seconds)

    def _repeat(self, had: Receipt, source: Source) -> Synced:
        """Compare `source` with this version, which the engine has already. Raises Refused if they differ."""
        receipt = Receipt(had.version)
        for bucket in self._buckets(source):
            receipt = receipt.plus(bucket)
        if receipt != had:
            raise Refused(f"the engine's version {had.version} was made of {had}, not of {receipt}: use a new version")
        self._pause(had.version)
        self._finish(had.version)
        return Synced(had, 0, False, self._seconds)

    def _pause(self, old: int) -> None:
        try:
            self._step(State.PAUSE, self.engine.pause)
        except Refused:
            self._move(State.SERVING)
            raise
        except Exception as error:
            if old < 0:  # awake it might generate
                raise self._die(f"pause failed: {error!r}, and sleep has dropped the weights") from error
            self._wake_weights()
            self._go_back(old)
            raise UpdateFailed(f"pause failed: {error!r}; the engine serves version {old}") from error
        self._wake_weights()

    def _wake_weights(self) -> None:
        if self.colocated and isinstance(self.engine, Colocated):
            self._must(State.WAKE_WEIGHTS, self.engine.wake_weights)

    def _send_all(self, update: Update, source: Source, first: Iterator[Bucket], old: int) -> tuple[Receipt, int]:
        for attempt in itertools.count(1):
            try:
                return self._send(update, first if attempt == 1 else self._buckets(source)), attempt
            except Exception as error:
                untouched = attempt == 1 and self.state is State.BEGIN and isinstance(error, Refused)
                if untouched or attempt == self.attempts:
                    self._restore(error, old, untouched)
        raise AssertionError

    def _send(self, update: Update, made: Iterator[Bucket]) -> Receipt:
        """Begin, send all buckets and commit. Raises SyncError if the engine's receipt is not that of what was sent."""
        self._step(State.BEGIN, self.engine.begin, update)
        sent = Receipt(update.version)
        while bucket := self._next(made):
            received, sent = self._step(State.SEND, self.engine.send, bucket), sent.plus(bucket)
            if received != sent:
                raise SyncError(f"after bucket {bucket.index} the engine has {received}, sent was {sent}")
        received = self._commit(update.version)
        if received != sent or self._query(self.engine.version) != update.version:
            raise self._die(f"version {update.version} was committed as {received}, sent was {sent}")
        return sent

    def _commit(self, version: int) -> Receipt:
        try:
            return self._step(State.COMMIT, self.engine.commit, version)
        except Exception:
            had = self._query(self.engine.receipt)
            if had is None or had.version != version:
                raise
            return had  # only the answer was lost

    def _restore(self, error: Exception, old: int, untouched: bool) -> NoReturn:
        """After the last attempt: go back to the old weights, or declare the engine dead. Always raises."""
        where = f"{self.state.value} failed: {error!r}"
        if not untouched:
            if not isinstance(self.engine, Reverting):
                raise self._die(f"{where}; this engine writes into the weights that it serves") from error
            self._must(State.REVERT, self.engine.revert)
        self._go_back(old)
        raise (Refused if untouched else UpdateFailed)(f"{where}; the engine serves version {old}") from error

    def _go_back(self, old: int) -> None:
        """Resume with the old weights. An engine that slept has lost its KV cache, whatever its prefix cache says."""
        if self.colocated:
            self._finish(old)
        else:
            self._resume(old)

    def _finish(self, version: int) -> None:
        """Reset all caches, wake the KV cache of a colocated engine, and resume."""
        for attempt in itertools.count(1):
            try:
                reset = self._step(State.RESET, self.engine.reset_caches)
                if kept := self.engine.caches - reset:
                    raise SyncError(f"these hold results of old weights: {', '.join(sorted(kept))}")
                break
            except Exception as error:
                if attempt == self.attempts:
                    raise self._die(f"reset_caches failed: {error!r}") from error
        self._wake_kv()
        self._resume(version)

    def _wake_kv(self) -> None:
        if self.colocated and isinstance(self.engine, Colocated):
            self._must(State.WAKE_KV, self.engine.wake_kv)

    def _resume(self, version: int) -> None:
        if (current := self._query(self.engine.version)) != version or version < 0:
            raise self._die(f"before resume the engine has version {current}, expected {version}")
        self._must(State.RESUME, self.engine.resume)
        self._move(State.SERVING)

    def _buckets(self, source: Source) -> Iterator[Bucket]:
        """The buckets of `source`. The first is made here: a source that fails or is empty leaves the engine alone."""
        made = _marked(buckets(_named(source() if callable(source) else source), self.bucket_bytes))
        if (first := next(made, None)) is None:
            raise Refused("there are no tensors to send, so the version stays")
        return itertools.chain([first], made)

    def _next(self, made: Iterator[Bucket]) -> Bucket | None:
        """The next bucket; None after the last.

        It is made in the caller's thread, so a time-out can declare the engine dead, but not end the wait.
        """
        seconds, begun = self.timeouts.source, time.monotonic()
        timer = threading.Timer(seconds or 0, self._die, (f"source: no bucket within {seconds} s",))
        timer.daemon = True
        if seconds is not None:
            timer.start()
        try:
            return next(made, None)
        finally:
            timer.cancel()
            self._took("source", begun)
            self._alive()

    def _must(self, state: State, call: Callable[[], None]) -> None:
        """Make a call on the engine, which is dead if that fails."""
        try:
            self._step(state, call)
        except Exception as error:
            raise self._die(f"{state.value} failed: {error!r}") from error

    def _step(self, state: State, call: Callable[..., T], *args: object) -> T:
        self._move(state)
        begun = time.monotonic()
        try:
            return self._bounded(state.value, call, *args)
        finally:
            self._took(state.value, begun)

    def _took(self, stage: str, begun: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - begun

    def _query(self, call: Callable[[], T]) -> T:
        return self._bounded("query", call)

    def _bounded(self, stage: str, call: Callable[..., T], *args: object) -> T:
        """Make a call. Raises EngineDead if it has not returned in time, since it may still act."""
        self._alive()
        seconds = getattr(self.timeouts, stage)
        try:
            return call(*args) if seconds is None else _in_thread(call, args).result(seconds)
        except TimeoutError as error:
            raise self._die(f"{stage} did not return within {seconds} s, and may still act") from error

    def _move(self, state: State) -> None:
        with self._moving:
            self._alive()
            if not may_follow(state, self.state):
                raise AssertionError(f"{state} after {self.state}")
            self.state = state

    def _alive(self) -> None:
        if self.state is State.DEAD:
            raise EngineDead(self.reason)

    def _die(self, reason: str) -> EngineDead:
        """Declare the engine dead, and return the error to raise. The first reason stays."""
        with self._moving:
            if self.state is not State.DEAD:
                self.state, self.reason = State.DEAD, reason
        return EngineDead(self.reason)


def _named(tensors: Iterable[Named]) -> Iterable[Named]:
    """The tensors. Iterating raises Refused for anything but (name, tensor); an export needs no check."""
    return tensors if isinstance(tensors, exporter.Stream) else _checked(tensors)


def _checked(tensors: Iterable[Named]) -> Iterator[Named]:
    for pair in tensors:
        match pair:
            case (described, torch.Tensor()) if isinstance(getattr(described, "name", described), str):
                yield pair
            case (described, None):
                raise Refused(f"{described} has no tensor here; the rank that is given an export's tensors updates")
            case _:
                text = " ".join(repr(pair).split())[:100]
                raise Refused(f"{text} came; expected (Hugging Face name, tensor), of a dict its items()")
        del pair  # nor does `enumerate` number the pairs: it holds on to what it gave last


def _marked(made: Iterable[exporter.Bucket]) -> Iterator[Bucket]:
    """Buckets of a sync; only the last is marked as such. Raises SyncError for a tensor that comes twice."""
    names: set[str] = set()
    held = None
    for bucket in made:
        if held is not None:
            yield Bucket.of(held.number, held.tensors(), last=False)
        for entry in bucket.entries:
            if entry.name in names:
                raise SyncError(f"{entry.name} came twice")
            names.add(entry.name)
        held = bucket
    if held is not None:
        yield Bucket.of(held.number, held.tensors(), last=True)


def _in_thread(call: Callable[..., T], args: tuple[object, ...]) -> Future[T]:
    """Run the call in a thread that does not keep the process from ending, on the caller's CUDA device.

    Torch has gradients on in a new thread, in which an engine could not write into its parameters.
    """
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            with torch.no_grad():
                future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"sync {getattr(call, '__name__', '')}", daemon=True).start()
    return future
