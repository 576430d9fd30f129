"""What made each token: labels against a log of all forwards, in random traces, and against logprobs of the weights."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engines import expected_logprobs, weights
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from docs.examples.small_engine import EMBEDDING, HEAD
from moeref import provenance
from moeref.provenance import Logprob, Provenance, ProvenanceError, Recorder

NONE, ROUTES = -1, provenance.COLUMNS.index("route_T")


class Event(NamedTuple):
    """Position `at` was run, found in the prefix cache, or sampled, in a request, with a version of the weights.

    `cut`: sampled, and cut off since.
    """

    what: str
    request: int
    at: int
    version: int


class World:
    """An engine and a trainer that go through a trace, and the log of what happened."""

    def __init__(self, keep_routes: bool) -> None:
        self.keep_routes = keep_routes
        self.version, self.requests = 0, 0
        self.tokens: list[int] = []
        self.log: list[Event] = []
        self.held = 0  # tokens of the request in the KV cache
        self.request: Recorder | None = None
        self.sample: Provenance = provenance.given([])
        self.turn([7, 8])

    # The trainer's side.

    def turn(self, tokens: list[int]) -> None:
        if self.request is None:
            self.sample = self.sample.then(tokens)
            self.tokens += tokens

    def truncate(self, length: int) -> None:
        if self.request is None and 0 < length < len(self.tokens):
            self.sample = self.sample.truncated(length)
            self.tokens = self.tokens[:length]
            # A token that is cut off had brought rows of routes out all the same.
            cut = [e._replace(what="cut") if e.what == "sample" and e.at >= length else e for e in self.log]
            self.log = [event for event in cut if event.at < length or event.what == "cut"]

    def start(self, cached: int, routes: bool) -> None:
        """A request for all tokens: the first one, a resumption, or a next turn."""
        if self.request is not None:
            return
        self.request = Recorder(self.tokens, lambda: self.version, keep_routes=self.keep_routes)
        self.requests += 1
        self.held = min(cached, len(self.tokens) - 1)
        # What is in a prefix cache may be of any version until now.
        versions = [(at * 7 + cached) % (self.version + 1) for at in range(self.held)]
        self.request.cached(versions, routes)
        self.log += [Event("found" if routes else "cached", self.requests, at, v) for at, v in enumerate(versions)]

    def end(self) -> None:
        """The answer, or what there was when it was aborted."""
        if self.request is not None:
            self.sample, self.request = self.sample.continued(self.request.provenance()), None

    # The engine's side.

    def update(self, jump: int, reset: bool) -> None:
        self.version += jump
        if reset:
            self.retract(0)

    def retract(self, keep: int) -> None:
        if self.request is not None:
            self.request.drop(keep)
            self.held = min(keep, self.held)

    def run(self, count: int) -> None:
        if self.request is not None:
            self.request.run(count)
            self.ran(min(self.held + count, len(self.tokens)))

    def ran(self, until: int) -> None:
        self.log += [Event("run", self.requests, at, self.version) for at in range(self.held, until)]
        self.held = until

    def step(self, tokens: list[int]) -> None:
        if self.request is not None:
            self.request.sample(tokens)
            for token in tokens:
                self.ran(len(self.tokens))
                self.log.append(Event("sample", self.requests, len(self.tokens), self.version))
                self.tokens.append(token)


def labels(log: list[Event], tokens: int, keep_routes: bool) -> list[tuple[int, int, int]]:
    """(weights, KV, route) of each token, searched for in the log."""
    return [(*_sampled(log, at), _route(log, at, keep_routes)) for at in range(tokens)]


def _sampled(log: list[Event], at: int) -> tuple[int, int]:
    for number, event in enumerate(log):
        if (event.what, event.at) == ("sample", at):
            mine = [e for e in log[:number] if e.request == event.request and e.what not in ("sample", "cut")]
            before = [e for e in mine if e.at < at]
            latest = {e.at: e.version for e in before}
            assert latest.keys() == set(range(at))
            return event.version, min(latest.values())
    return NONE, NONE


def _route(log: list[Event], at: int, keep_routes: bool) -> int:
    """Of the first request that has a row of routes of this token: what a later one has of it comes too late."""
    requests = dict.fromkeys(event.request for event in log)
    rows = (_row([event for event in log if event.request == request], at, keep_routes) for request in requests)
    return next((row for row in rows if row != NONE), NONE)


def _row(of_request: list[Event], at: int, keep_routes: bool) -> int:
    row = NONE
    for event in of_request:
        if event.at == at and event.what in ("run", "found"):
            row = event.version
        elif event.what in ("sample", "cut") and event.at > at and keep_routes:
            break  # the row, or none, came out with this token
    return row


OPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 2), st.booleans()),
    st.tuples(st.just("retract"), st.integers(0, 9)),
    st.tuples(st.just("run"), st.integers(1, 3)),
    st.tuples(st.just("step"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.just("step"), st.lists(st.integers(0, 5), min_size=1, max_size=1)),
    st.tuples(st.just("start"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("end")),
    st.tuples(st.just("turn"), st.lists(st.integers(0, 5), max_size=3)),
    st.tuples(st.just("truncate"), st.integers(1, 12)),
)


@settings(
    max_examples=int(os.environ.get("MOEREF_FUZZ", "150")), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(ops=st.lists(OPS, min_size=5, max_size=30), keep_routes=st.booleans())
@example(
    ops=[("step", [0]), ("update", 1, False), ("retract", 0), ("run", 1), ("end",), ("truncate", 1)], keep_routes=True
)
@example(  # the second request has no row of the first token, though it runs that once more, and the third finds one
    ops=[("end",), ("start", 1, False), ("step", [0]), ("retract", 0), ("run", 1), ("end",), ("start", 1, True)],
    keep_routes=True,
)
def test_labels_are_what_the_log_of_forwards_says(ops: list[tuple[Any, ...]], keep_routes: bool) -> None:
    world = World(keep_routes)
    world.start(0, False)
    for name, *values in ops:
        before = world.sample
        getattr(world, name)(*values)
        same = min(len(before), len(world.sample))
        pairs = [(a[:same], b[:same]) for a, b in zip(before.columns(), world.sample.columns(), strict=True)]
        # A label once given stays; only a missing row of routes may come later.
        for number, (old, new) in enumerate(pairs):
            assert ((old == new) | ((number == ROUTES) & (old < 0))).all()
    world.end()
    found = world.sample
    assert found.tokens_T.tolist() == world.tokens
    columns = (found.weights_T, found.kv_T, found.route_T)
    wanted = labels(world.log, len(world.tokens), keep_routes)
    assert [tuple(int(c[at]) for c in columns) for at in range(len(found))] == wanted
    assert found.logprob_T.tolist() == [int(w >= 0) for w, _, _ in wanted]
    mixed_are_counted(found, wanted)


def mixed_are_counted(found: Provenance, wanted: list[tuple[int, int, int]]) -> None:
    sampled = [at for at, (weights, _, _) in enumerate(wanted) if weights >= 0]
    stale = {at for at in sampled if wanted[at][0] != wanted[at][1]}
    before = {at: wanted[at - 1][2] for at in sampled}
    other = {at for at in sampled if before[at] not in (NONE, wanted[at][0])}
    versions = sorted({wanted[at][0] for at in sampled})
    unrouted = sum(before[at] == NONE for at in sampled)
    assert found.counts() == (len(sampled), tuple(versions), len(stale), len(other), unrouted)
    assert np.flatnonzero(found.trainable("keep")).tolist() == sampled
    assert np.flatnonzero(found.trainable("mask")).tolist() == [at for at in sampled if at not in stale | other]
    if len(versions) > 1 or stale or other:
        with pytest.raises(ProvenanceError, match="mixed versions"):
            found.trainable()
    else:
        assert np.flatnonzero(found.trainable()).tolist() == sampled


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["sample", "sample", "update", "update and reset", "retract"]), min_size=3, max_size=12)
)
def test_logprobs_are_those_of_the_labelled_weights(ops: list[str]) -> None:
    """A small model whose KV cache is the embeddings: what is not stale equals the labelled weights' own logprob."""
    truth = [weights(0)]
    tokens, cache, logprobs = [1, 2], list[torch.Tensor](), []
    record = Recorder(tokens, lambda: len(truth) - 1)
    for op in ops:
        if op.startswith("update"):
            truth.append(weights(len(truth)))
        if op in ("retract", "update and reset"):
            cache = cache[: 1 if op == "retract" else 0]
            record.drop(len(cache))
        if op == "sample":
            cache += [truth[-1][EMBEDDING][token] for token in tokens[len(cache) :]]
            logprobs_V = torch.log_softmax(truth[-1][HEAD] @ torch.stack(cache).mean(0), 0)
            tokens.append(int(logprobs_V.argmax()))
            logprobs.append(logprobs_V[tokens[-1]])
            record.sample(tokens[-1:])
    found = record.provenance()
    for at, logprob in enumerate(logprobs, start=2):
        own = expected_logprobs(truth[found.weights_T[at]], tuple(tokens[:at]))[tokens[at]]
        assert torch.isclose(own, logprob, atol=1e-5) == (found.kv_T[at] == found.weights_T[at])


def record(**settings: Any) -> tuple[Recorder, list[int]]:
    version = [3]
    return Recorder([1, 2], lambda: version[0], **settings), version


def test_drafts_that_are_accepted_are_of_one_forward() -> None:
    request, version = record(logprob=Logprob.PROCESSED)
    request.sample([5, 6, 7])
    version[0] = 4
    request.sample([8])
    found = request.provenance()
    assert found.weights_T.tolist() == [-1, -1, 3, 3, 3, 4]
    assert found.kv_T.tolist() == [-1, -1, 3, 3, 3, 3]
    assert found.route_T.tolist() == [3, 3, 3, 3, 4, -1]
    assert found.logprob_T.tolist() == [0, 0, 2, 2, 2, 2]
    assert found.counts() == (4, (3, 4), 1, 0, 0)


@pytest.mark.parametrize(("keep_routes", "routes"), [(True, [3, 3, 4, -1]), (False, [4, 4, 4, -1])])
def test_a_retraction_runs_tokens_again(keep_routes: bool, routes: list[int]) -> None:
    request, version = record(keep_routes=keep_routes)
    request.sample([5])
    version[0] = 4
    request.drop()
    request.sample([6])
    found = request.provenance()
    assert (found.weights_T.tolist(), found.route_T.tolist()) == ([-1, -1, 3, 4], routes)
    assert found.counts().other_routes == (not keep_routes)


def test_a_chunk_of_a_prompt_that_is_run_again_before_the_first_token_has_the_later_row() -> None:
    """vLLM reads a prompt's rows when the first token is sampled, from where the last forward left them."""
    request, version = record()
    request.run(1)
    version[0] = 4
    request.drop()
    request.sample([5])
    assert request.provenance().route_T.tolist() == [4, 4, -1]


def test_a_resumption_keeps_the_labels_of_the_aborted_part() -> None:
    request, version = record()
    request.sample([5])
    aborted = request.provenance()
    version[0] = 4
    again = Recorder(aborted.tokens_T.tolist(), lambda: 4)
    again.sample([6])
    whole = aborted.continued(again.provenance())
    assert whole.weights_T.tolist() == [-1, -1, 3, 4]
    assert whole.route_T.tolist() == [3, 3, 4, -1]
    with pytest.raises(ProvenanceError, match="does not begin with these 3 tokens"):
        aborted.continued(provenance.given([1, 2, 9, 6]))
    with pytest.raises(ProvenanceError, match="does not begin with these 3 tokens"):
        aborted.continued(provenance.given([1, 2]))
    relabelled, _ = record()
    relabelled._version = lambda: 4
    relabelled.sample([5])
    with pytest.raises(ProvenanceError, match="token 2 was not sampled by the later request"):
        aborted.continued(relabelled.provenance())


def test_an_abort_before_the_first_token_has_no_label() -> None:
    request, _ = record()
    request.run(1)
    found = request.provenance()
    assert (found.counts().sampled, found.route_T.tolist()) == (0, [3, -1])
    assert not found.trainable().any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights_T": [0, 2]},
        {"kv_T": [-1, 3]},
        {"kv_T": [0, 2]},
        {"kv_T": [-1, -1]},
        {"logprob_T": [1, 1]},
        {"logprob_T": [0, 0]},
        {"route_T": [0]},
        {"tokens_T": [1, 2, 3]},
        {"weights_T": [-1.0, 2.0], "kv_T": [-1, 2]},
        {"tokens_T": [True, False]},
    ],
)
def test_labels_that_contradict_each_other_are_refused(wrong: dict[str, list[int]]) -> None:
    good: dict[str, Any] = {"tokens_T": [1, 2], "weights_T": [-1, 2], "kv_T": [-1, 2]}
    good |= {"route_T": [2, -1], "logprob_T": [0, 1]}
    assert len(Provenance(**good)) == 2
    with pytest.raises(ProvenanceError, match="token"):
        Provenance(**good | wrong)


def test_labels_cannot_be_written() -> None:
    mine = np.array([-1, 2])
    found = Provenance(np.array([1, 2]), mine, mine, np.array([2, -1]), np.array([0, 1]))
    mine[1] = 5
    assert found.weights_T.tolist() == [-1, 2]
    with pytest.raises(ValueError, match="read-only"):
        found.weights_T[1] = 5


def test_what_cannot_be_is_an_error() -> None:
    request, _ = record()
    with pytest.raises(ProvenanceError, match="the last one must be run"):
        request.cached([1, 1], routes=True)
    with pytest.raises(ProvenanceError, match="3 of 2 tokens"):
        provenance.given([1, 2]).truncated(3)
