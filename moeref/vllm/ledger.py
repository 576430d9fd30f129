"""Records what made each token, at every forward in vLLM's worker: it has the weights and knows their version.

The version at the time when a request is sent or answered can be another one. The scheduler's output says which
positions run and which blocks of the KV cache hold the rest. The version that wrote each slot of a block is kept, so
that a hit in the prefix cache has it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moeref.provenance import COLUMNS, NONE, Logprob, ProvenanceError, Recorder

#: Columns of a `Provenance` by name, in lists that JSON has. The worker does not know the ids of sampled tokens: -1.
Labels = dict[str, list[int]]
#: The labels of this many ended requests wait, at most, to be asked for; the oldest are forgotten.
WAITING = 1 << 16
#: What vLLM adds to the id of a request to make it unique.
_RANDOM = len("-12345678")


@dataclass
class _Request:
    id: str  # vLLM's
    prompt: int  # tokens
    recorder: Recorder
    blocks: list[int] = field(default_factory=list)  # of the KV cache, in order
    told: bool = False  # whether `take` has given its labels out
    broken: str = ""  # why its forwards are not understood

    @property
    def name(self) -> str:
        """The caller's id."""
        return self.id[:-_RANDOM]


class _Forward(NamedTuple):
    """A request's part of a forward: of its `known` tokens `computed` are in the KV cache, and `tokens` more run."""

    request: _Request
    resumed: bool
    computed: int
    known: int
    tokens: int


class Ledger:
    """The labels of all requests of a worker whose KV cache has `blocks` blocks of `size` tokens.

    group: the KV cache group whose blocks are followed. logprob: the kind that the engine returns.
    """

    def __init__(self, blocks: int, size: int, group: int = 0, logprob: Logprob = Logprob.RAW) -> None:
        self._size, self._group, self._logprob = size, group, logprob
        self._wrote = np.full(blocks * size, NONE, np.int64)  # the version that wrote each slot
        self._requests: dict[str, _Request] = {}  # by vLLM's id
        self._ended: dict[str, _Request] = {}  # not asked for yet
        self._named: dict[str, list[_Request]] = {}  # by the caller's id
        self._version = 0

    def step(self, scheduled: Any, version: int) -> None:
        """Record a forward of vLLM's `SchedulerOutput` with the weights `version`, before it runs."""
        self._version = version
        for id_ in scheduled.finished_req_ids:
            self._end(id_)
        forwards = {forward.request.id: forward for forward in (*self._first(scheduled), *self._later(scheduled))}
        for id_ in scheduled.num_scheduled_tokens:  # in their order, since a prompt can hit blocks of one before it
            forward = forwards[id_]
            if scheduled.scheduled_spec_decode_tokens.get(id_):
                forward.request.broken = "drafts, whose tokens are not recorded"
            if not forward.request.broken:
                self._run(forward)

    def take(self, name: str, index: int | None = None) -> Labels:
        """The labels of a request by its caller's id, given out once. `index`: which of n samples, if n is more than 1.

        Raises ProvenanceError unless one request has this id, and for a request whose forwards are not understood.
        """
        name = name if index is None else f"{index}_{name}"
        matches = [request for request in self._named.get(name, ()) if not request.told]
        if len(matches) != 1:
            raise ProvenanceError(f"{len(matches)} requests {name!r} have labels; ask once, and give each its own id")
        (request,) = matches
        request.told = True
        if self._ended.pop(request.id, None):
            self._forget(request)
        if request.broken:
            raise ProvenanceError(f"request {name!r} has no labels: {request.broken}")
        columns = request.recorder.provenance().columns()
        return {column: values.tolist() for column, values in zip(COLUMNS, columns, strict=True)}

    def _first(self, scheduled: Any) -> Iterator[_Forward]:
        """Of requests that come with their prompt; one that came before was preempted (vLLM's second model runner)."""
        for new in scheduled.scheduled_new_reqs:
            prompt = new.prompt_token_ids or ()
            resumed = new.req_id in self._requests
            request = self._requests[new.req_id] if resumed else self._admit(new.req_id, prompt)
            request.blocks = list(new.block_ids[self._group])
            known = len(getattr(new, "prefill_token_ids", None) or prompt)
            yield _Forward(request, resumed, new.num_computed_tokens, known, scheduled.num_scheduled_tokens[new.req_id])

    def _later(self, scheduled: Any) -> Iterator[_Forward]:
        cached = scheduled.scheduled_cached_reqs
        for at, id_ in enumerate(cached.req_ids):
            request, resumed = self._requests[id_], id_ in cached.resumed_req_ids
            new = list(cached.new_block_ids[at][self._group]) if cached.new_block_ids[at] else []
            if resumed:
                request.blocks.clear()
            request.blocks += new
            known = request.prompt + cached.num_output_tokens[at]
            yield _Forward(request, resumed, cached.num_computed_tokens[at], known, scheduled.num_scheduled_tokens[id_])

    def _admit(self, id_: str, prompt: Sequence[int]) -> _Request:
        recorder = Recorder(prompt, lambda: self._version, logprob=self._logprob)
        request = self._requests[id_] = _Request(id_, len(prompt), recorder)
        self._named.setdefault(request.name, []).append(request)
        return request

    def _run(self, forward: _Forward) -> None:
        request, resumed, computed, known, tokens = forward
        recorder = request.recorder
        if resumed:
            recorder.drop()
        if computed and not recorder.held:
            recorder.cached(self._wrote[self._slots(request, 0, computed)].tolist(), routes=True)
        if (recorder.held, len(recorder)) != (computed, known):
            request.broken = f"{computed} of {known} tokens are computed, recorded {recorder.held} of {len(recorder)}"
            return
        one = tokens == 1  # nearly always, so that it is kept cheap
        slots = self._slot(request, computed) if one else self._slots(request, computed, computed + tokens)
        self._wrote[slots] = self._version
        if computed + tokens < known:
            recorder.run(tokens)
        else:
            recorder.sample([NONE])

    def _slot(self, request: _Request, at: int) -> int:
        return request.blocks[at // self._size] * self._size + at % self._size

    def _slots(self, request: _Request, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The slots of the KV cache that hold the tokens at positions `begin` to `end`, which is not included."""
        first = begin // self._size
        blocks = np.asarray(request.blocks[first : -(-end // self._size)], np.int64)
        at = np.arange(begin, end) - first * self._size
        slots: npt.NDArray[np.int64] = blocks[at // self._size] * self._size + at % self._size
        return slots

    def _end(self, id_: str) -> None:
        request = self._requests.pop(id_, None)
        if request is None:
            return
        if request.told:
            self._forget(request)
        else:
            self._ended[id_] = request
        if len(self._ended) > WAITING:
            self._forget(self._ended.pop(next(iter(self._ended))))

    def _forget(self, request: _Request) -> None:
        left = [other for other in self._named[request.name] if other is not request]
        if left:
            self._named[request.name] = left
        else:
            del self._named[request.name]
