"""The small engine of the documentation in other forms, and with a fault in one of its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from docs.examples.small_engine import DRAFT, EMBEDDING, HEAD, SmallEngine
from moeref.sync import Bucket, Receipt, SyncError

Weights = dict[str, torch.Tensor]
VOCABULARY, HIDDEN = 7, 3


def weights(seed: int, drafts: bool = False) -> Weights:
    rng = torch.Generator().manual_seed(seed)
    shapes = {EMBEDDING: (VOCABULARY, HIDDEN), HEAD: (VOCABULARY, HIDDEN)} | ({DRAFT: (4, HIDDEN)} if drafts else {})
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def expected_logprobs(given: Weights, tokens: tuple[int, ...]) -> torch.Tensor:
    """What an engine with these weights says, without caches: in float64, to a rounding error."""
    mean_H = given[EMBEDDING][list(tokens)].double().mean(0)
    return torch.log_softmax(given[HEAD].double() @ mean_H, 0).float()


class StagedEngine(SmallEngine):
    """Keeps the old weights until it commits."""

    def __init__(self, given: Weights, version: int = 0) -> None:
        super().__init__(given, version)
        self.staged: Weights = {}

    def begin(self, update: Any) -> None:
        super().begin(update)
        self.staged = {}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self.weights or self.weights[name].shape != tensor.shape:
            raise SyncError(f"no {name}")
        self.staged[name] = tensor

    def commit(self, version: int) -> Receipt:
        receipt = super().commit(version)
        self.weights |= {name: tensor.clone() for name, tensor in self.staged.items()}
        return receipt

    def revert(self) -> None:
        self.staged = {}
        self.intake.forget()


class SleepingEngine(SmallEngine):
    """Colocated: without memory for weights and cache while it sleeps. Level 2 drops the weights."""

    def __init__(self, given: Weights, version: int = 0) -> None:
        super().__init__(given, version)
        self.backup: Weights | None = None
        self.order: list[str] = []

    def sleep(self, level: int) -> None:
        self.backup = self.weights
        if level == 2:
            self.backup = {name: torch.full_like(tensor, torch.nan) for name, tensor in self.weights.items()}
            self.intake.version = -1
        self.weights, self.sums, self.order = {}, {}, []

    @property
    def asleep(self) -> int:
        """The level; 0 if it is awake."""
        return 0 if self.backup is None else 2 if self.version() < 0 else 1

    def wake_weights(self) -> None:
        self.weights, self.backup = self.weights or self.backup or {}, None
        self.order.append("weights")

    def send(self, bucket: Bucket) -> Receipt:
        self.order.append("send")
        return super().send(bucket)

    def reset_caches(self) -> frozenset[str]:
        self.order.append("reset")
        return super().reset_caches()

    def wake_kv(self) -> None:
        self.order.append("kv")


@dataclass
class Fault:
    """`how` the `nth` call of `call` fails, once or, without `once`, from then on."""

    call: str
    how: str
    nth: int = 0
    once: bool = True
    seen: int = 0
    fired: bool = False

    def strikes(self) -> bool:
        """Whether this call, another one of `call`, fails."""
        self.seen += 1
        if self.seen <= self.nth or (self.once and self.fired):
            return False
        self.fired = True
        return True


#: Faults of any call, of `send` alone, and of others alone.
ANY = ("raise before", "raise after", "hang before", "hang after")
OF = {
    "send": ("miscounted", "lost", "lost silently", "duplicated", "truncated", "changed", "reordered"),
    "commit": ("nothing", "miscounted"),
    "reset_caches": ("nothing",),
}
CALLS = ("pause", "begin", "send", "commit", "reset_caches", "resume", "revert", "wake_weights", "wake_kv")


class Broken(Exception):
    """What a fault raises."""


def faulty(kind: type[SmallEngine]) -> type[Any]:
    """The engine, whose calls fail as `faults` say. The event `released` lets hanging calls go."""

    def of(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            real = getattr(kind, name)
            self.log.append(name)
            for fault in self.faults:
                if fault.call == name and fault.strikes():
                    return _fail(fault.how, self, real, *args)
            return real(self, *args)

        return call

    made = {name: of(name) for name in CALLS if hasattr(kind, name)}
    return type(f"Faulty{kind.__name__}", (kind,), {**made, "faults": (), "log": ()})


def _fail(how: str, engine: Any, real: Callable[..., Any], *args: Any) -> Any:
    if how.endswith(("before", "after")):
        if how.endswith("after"):
            real(engine, *args)
        if how.startswith("hang"):
            engine.released.wait(20)
        raise Broken(how)
    if how == "miscounted":
        return replace(real(engine, *args), tensors=99)
    if how == "nothing":
        return frozenset() if not args else Receipt(args[0])
    (bucket,) = args
    if how == "lost":
        return engine.intake.received
    if how == "lost silently":  # the transport says that all is well
        return engine.intake.received.plus(bucket)
    if how == "duplicated":
        real(engine, bucket)
    return real(engine, _changed(how, bucket))


def _changed(how: str, bucket: Bucket) -> Bucket:
    (name, tensor), *rest = bucket.tensors
    if how == "truncated":
        return replace(bucket, tensors=tuple(rest))
    if how == "changed":
        return replace(bucket, tensors=((name, tensor + 1), *rest))
    if how == "reordered":
        return replace(bucket, index=bucket.index + 1)
    return bucket
