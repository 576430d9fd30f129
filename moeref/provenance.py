"""What made each token: versions of the weights, of the KV cache and of the row of routes, and the kind of logprob.

A version that is read when a request is sent or its answer arrives may have made none of its tokens (AReaL#1569). So
labels come from a `Recorder` next to the engine's scheduler, which reads the version at each forward. What a trainer
does later (turns, resumptions, truncation) moves labels with their tokens and changes none.

Shape suffix: T tokens of prompt and completion, in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

NONE = -1
Versions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class ProvenanceError(ValueError):
    """Labels that contradict each other or the tokens, or mixed versions where they are refused."""


class Logprob(enum.IntEnum):
    """What the logprob of a token is: RAW of the logits, PROCESSED by temperature, top-p and the like, or none."""

    NONE = 0
    RAW = 1
    PROCESSED = 2


class Counts(NamedTuple):
    """Sampled tokens, the versions that sampled them, and how many are mixed.

    `stale_kv`: sampled from a KV cache of older weights. `other_routes`: the row of routes is not of the weights that
    sampled, as after a retraction. `unrouted`: the forward that sampled has no row of routes.
    """

    sampled: int
    versions: tuple[int, ...]
    stale_kv: int
    other_routes: int
    unrouted: int


@dataclass(frozen=True, eq=False)
class Provenance:
    """The tokens of a sample, and what made them. -1 stands for no version.

    `weights_T`: the version that sampled the token; -1 for one that was given: of a prompt, a tool, a user.
    `kv_T`: the oldest version in the KV cache that it attended to, itself sampled by `weights_T`; -1 as above.
    `route_T`: the version that ran the token and so made its row of routes; -1 if it has none, as the last sampled one.

    Arrays cannot be written to. Raises ProvenanceError for labels that cannot be.
    """

    tokens_T: npt.NDArray[np.int64]
    weights_T: Versions
    kv_T: Versions
    route_T: Versions
    logprob_T: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        for column in fields(self):
            kind = np.uint8 if column.name == "logprob_T" else np.int64
            told = np.asarray(getattr(self, column.name))
            if told.size and told.dtype.kind not in "iu":
                raise ProvenanceError(f"{column.name} holds {told.dtype}, and tokens, versions and kinds are integers")
            values = np.array(told, kind)
            values.flags.writeable = False
            object.__setattr__(self, column.name, values)
        if {values.shape for values in self.columns()} != {(len(self),)}:
            raise ProvenanceError(f"{len(self)} tokens, columns of shapes {[c.shape for c in self.columns()]}")
        made = self.sampled_T
        impossible = (made != (self.kv_T >= 0)) | (made != (self.logprob_T > 0)) | (self.kv_T > self.weights_T)
        if (bad := np.flatnonzero(impossible)).size:
            at = int(bad[0])
            labels = dict(zip(COLUMNS, (c[at].item() for c in self.columns()), strict=True))
            rule = "a sampled token has weights_T, kv_T up to that and a kind of logprob, any other token none of them"
            raise ProvenanceError(f"token {at}: {labels}: {rule}")

    def __len__(self) -> int:
        return int(self.tokens_T.size)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays, in the order of the fields."""
        return (self.tokens_T, self.weights_T, self.kv_T, self.route_T, self.logprob_T)

    @property
    def sampled_T(self) -> Mask:
        """True for tokens that an engine sampled."""
        return np.greater_equal(self.weights_T, 0)

    @property
    def mixed_T(self) -> Mask:
        """True for sampled tokens whose logits, KV cache and routes are not of one version."""
        mixed_T: Mask = self._stale_T | self._other_routes_T
        return mixed_T

    @property
    def _stale_T(self) -> Mask:
        return self.sampled_T & np.not_equal(self.kv_T, self.weights_T)

    @property
    def _before_T(self) -> Versions:
        """The routes of the forward that sampled a token: the row of the token before it."""
        return np.concatenate([np.full(min(1, len(self)), NONE), self.route_T])[: len(self)]

    @property
    def _other_routes_T(self) -> Mask:
        return self.sampled_T & np.greater_equal(self._before_T, 0) & np.not_equal(self._before_T, self.weights_T)

    def counts(self) -> Counts:
        """How many tokens are mixed, and of which versions the sample is."""
        made = self.sampled_T
        versions = tuple(int(version) for version in np.unique(self.weights_T[made]))
        unrouted = made & (self._before_T < 0)
        sums = [int(mask.sum()) for mask in (self._stale_T, self._other_routes_T, unrouted)]
        return Counts(int(made.sum()), versions, *sums)

    def trainable(self, mixed: Literal["refuse", "keep", "mask"] = "refuse") -> Mask:
        """Which tokens to train on: all sampled ones, or with `mask` those that are not mixed.

        Raises ProvenanceError with `refuse` if a token is mixed or the sample is of several versions.
        """
        found = self.counts()
        if mixed == "refuse" and (len(found.versions) > 1 or self.mixed_T.any()):
            raise ProvenanceError(f"mixed versions: {found}; train on them with mixed='keep', or 'mask' mixed tokens")
        trained_T: Mask = self.sampled_T & ~self.mixed_T if mixed == "mask" else self.sampled_T
        return trained_T

    def truncated(self, length: int) -> Provenance:
        """The first `length` tokens. Raises ProvenanceError if there are fewer."""
        if not 0 <= length <= len(self):
            raise ProvenanceError(f"there is no prefix of {length} of {len(self)} tokens")
        return Provenance(*(values[:length] for values in self.columns()))

    def then(self, tokens: Sequence[int]) -> Provenance:
        """With tokens that no engine sampled after it: the next turn of a user or a tool."""
        return Provenance(*map(np.concatenate, zip(self.columns(), given(tokens).columns(), strict=True)))

    def continued(self, later: Provenance) -> Provenance:
        """With what a later request added, whose prompt begins with all of these tokens: a resumption or a next turn.

        Each token keeps its labels. A row of routes that is missing here, as that of the last token, is taken from it.
        Raises ProvenanceError for other tokens, or if `later` says that it sampled tokens of its prompt otherwise.
        """
        old, new = len(self), later.truncated(min(len(self), len(later)))
        if len(new) < old or (new.tokens_T != self.tokens_T).any():
            raise ProvenanceError(f"the later request does not begin with these {old} tokens")
        relabelled = new.sampled_T & ((new.weights_T != self.weights_T) | (new.kv_T != self.kv_T))
        if relabelled.any():
            raise ProvenanceError(f"token {int(relabelled.argmax())} was not sampled by the later request")
        route_T = np.where(self.route_T < 0, new.route_T, self.route_T)
        first = replace(self, route_T=route_T).columns()
        return Provenance(*(np.concatenate([a, b[old:]]) for a, b in zip(first, later.columns(), strict=True)))


COLUMNS = tuple(column.name for column in fields(Provenance))


def given(tokens: Sequence[int]) -> Provenance:
    """Tokens that no engine sampled."""
    none = np.full(len(tokens), NONE)
    return Provenance(np.asarray(tokens, np.int64), none, none, none, np.zeros(len(tokens), np.uint8))


class Recorder:
    """The labels of one request, made where its forwards are run.

    `version` gives the engine's present version, the one that its weight updates raise. `keep_routes`: each sampled
    token brings the rows before it out, and a token that is run again later keeps its row (vLLM); otherwise the last
    one counts (SGLang after a retraction).
    """

    def __init__(
        self,
        prompt: Sequence[int],
        version: Callable[[], int],
        *,
        logprob: Logprob = Logprob.RAW,
        keep_routes: bool = True,
    ) -> None:
        self._version, self._logprob, self._keep = version, logprob, keep_routes
        self._rows = [[token, NONE, NONE, NONE, int(Logprob.NONE)] for token in prompt]
        self._cache: list[int] = []  # of each token, the oldest version in the cache up to it
        self._out = 0  # rows of routes that are out

    @property
    def held(self) -> int:
        """How many tokens are in the KV cache."""
        return len(self._cache)

    def __len__(self) -> int:
        return len(self._rows)

    def cached(self, versions: Sequence[int], routes: bool) -> None:
        """The prefix cache had the KV of the first tokens, made by these versions, and their rows of routes or none."""
        if self._cache or len(versions) >= len(self._rows):
            raise ProvenanceError(f"{len(versions)} tokens cached of {len(self._rows)}: the last one must be run, once")
        for version in versions:
            self._hold(version, routes)

    def _hold(self, version: int, routes: bool = True) -> None:
        """The next token is in the cache now, and its row of routes is there or not."""
        at = len(self._cache)
        if routes and (at >= self._out or not self._keep):
            self._rows[at][3] = version
        self._cache.append(min(version, self._cache[-1] if self._cache else version))

    def run(self, tokens: int | None = None) -> None:
        """Run the next `tokens` that are not in the KV cache, or all: a chunk of a prompt, or what was dropped."""
        left = len(self._rows) - len(self._cache)
        for _ in range(left if tokens is None else min(tokens, left)):
            self._hold(self._version())

    def sample(self, tokens: Sequence[int]) -> None:
        """A forward of all that is not in the KV cache; it sampled one token, or with drafts (MTP) accepted several."""
        self.run()
        version, oldest = self._version(), self._cache[-1]
        self._rows += [[token, version, oldest, NONE, int(self._logprob)] for token in tokens]
        self.run(len(tokens) - 1)
        self._out = len(self._cache)

    def drop(self, keep: int = 0) -> None:
        """The KV cache is gone but for the first tokens: a retraction, a preemption, or a reset in an update."""
        del self._cache[keep:]

    def provenance(self) -> Provenance:
        """What is there now: at the end, after an abort, or on the way."""
        return Provenance(*np.array(self._rows).reshape(-1, len(COLUMNS)).T)
