"""Weight updates as transactions: with a failure in every step, afterwards all is new, or all is old, or dead."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from engines import (
    ANY,
    CALLS,
    OF,
    Broken,
    Fault,
    SleepingEngine,
    StagedEngine,
    Weights,
    expected_logprobs,
    faulty,
    weights,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from docs.examples.small_engine import DRAFT, EMBEDDING, HEAD, SmallEngine
from moeref.exporter import BucketError
from moeref.sync import EngineDead, Refused, State, SyncError, Timeouts, UpdateFailed, WeightSync
from moeref.sync.states import FOLLOWS, may_follow

#: Buckets that hold one tensor of the small model.
SMALL = {"bucket_bytes": 300}
PROMPTS = [(1,), (1, 2), (1, 2, 3), (4, 4)]


def serves(engine: Any, given: Weights) -> None:
    """The engine's weights are `given`, bit by bit, and so are its answers, from caches or not."""
    assert engine.weights.keys() == given.keys()
    assert all(torch.equal(engine.weights[name], given[name]) for name in given)
    for tokens in PROMPTS:
        torch.testing.assert_close(engine.logprobs(tokens), expected_logprobs(given, tokens), atol=1e-5, rtol=0)


def pair(kind: type[Any] = SmallEngine, *faults: Fault, **settings: Any) -> tuple[Any, WeightSync]:
    """An engine whose caches are warm, and its sync."""
    engine = started(kind, weights(0), 0, faults)
    return engine, WeightSync(engine, timeouts=timeouts(faults), **{**SMALL, **settings})


def started(kind: type[Any], given: Weights, version: int, faults: Sequence[Fault] = ()) -> Any:
    engine = faulty(kind)(given, version)
    engine.faults, engine.released, engine.log = faults, threading.Event(), []
    for tokens in PROMPTS:
        engine.logprobs(tokens)
    return engine


def timeouts(faults: Sequence[Fault]) -> Timeouts:
    """Short where a call hangs, so that no other call meets its own on a busy machine."""
    return Timeouts(**{fault.call: 0.05 for fault in faults if fault.how.startswith("hang")})


def test_new_weights_are_served_and_old_ones_gone() -> None:
    engine, sync = pair()
    serves(engine, weights(0))
    done = sync.update(weights(1).items(), 5)
    serves(engine, weights(1))
    assert (done.receipt.version, done.receipt.buckets, done.receipt.nbytes, done.sent) == (5, 2, 2 * 7 * 3 * 4, True)
    assert done.receipt == engine.receipt()
    assert engine.log == ["pause", "begin", "send", "send", "commit", "reset_caches", "resume"]
    assert done.seconds.keys() == {"pause", "begin", "source", "send", "commit", "reset_caches", "resume"}
    assert sync.state is State.SERVING


@pytest.mark.parametrize("send", [None, 600])
def test_an_engine_may_write_into_parameters(send: float | None) -> None:
    engine = SmallEngine(weights(0))
    engine.weights = {name: torch.nn.Parameter(tensor) for name, tensor in engine.weights.items()}
    WeightSync(engine, timeouts=Timeouts(send=send)).update(weights(1).items(), 1)
    serves(engine, weights(1))


def test_a_delta_changes_what_it_names() -> None:
    engine, sync = pair()
    sync.update(weights(1).items(), 1)
    changed = {HEAD: weights(2)[HEAD]}
    with pytest.raises(Refused, match="delta to version 0"):
        sync.update(changed.items(), 2, kind="delta", base=0)
    sync.update(changed.items(), 2, kind="delta", base=1)
    serves(engine, weights(1) | changed)


@pytest.mark.parametrize("staged", [False, True])
def test_a_full_update_without_a_tensor_is_not_committed(staged: bool) -> None:
    engine, sync = pair(StagedEngine if staged else SmallEngine)
    with pytest.raises(UpdateFailed if staged else EngineDead, match=f"without {HEAD}"):
        sync.update([(EMBEDDING, weights(1)[EMBEDDING])], 1)
    assert engine.version() == 0
    if staged:
        serves(engine, weights(0))


def test_colocated_weights_wake_before_they_are_sent_and_the_cache_after() -> None:
    engine, sync = pair(SleepingEngine, colocated=True)
    engine.sleep(level=1)
    sync.update(weights(1).items(), 1)
    assert engine.order == ["weights", "send", "send", "reset", "kv"]
    serves(engine, weights(1))


def test_after_deep_sleep_only_a_full_update_follows() -> None:
    engine, sync = pair(SleepingEngine, colocated=True)
    sync.update(weights(1).items(), 1)
    engine.sleep(level=2)
    with pytest.raises(Refused, match="delta to version 1"):
        sync.update(weights(2).items(), 2, kind="delta", base=1)
    assert engine.order == []
    sync.update(weights(1).items(), 1)
    serves(engine, weights(1))


def test_an_engine_that_has_dropped_its_weights_stays_asleep_where_its_pause_fails() -> None:
    engine, sync = pair(SleepingEngine, colocated=True)
    engine.sleep(level=2)
    engine.pause = partial(divmod, 1, 0)  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match=r"pause failed: ZeroDivisionError.*, and sleep has dropped the weights"):
        sync.update(weights(1).items(), 1)
    assert (engine.asleep, engine.order) == (2, [])


def test_an_engine_that_cannot_wake_is_no_colocated_one() -> None:
    with pytest.raises(TypeError, match="wake_weights"):
        pair(SmallEngine, colocated=True)


def test_drafts_belong_to_the_update_or_are_refused() -> None:
    engine = SmallEngine(weights(0, drafts=True))
    sync = WeightSync(engine, **SMALL)
    with pytest.raises(Refused, match="has drafts"):
        sync.update(weights(1).items(), 1)
    with pytest.raises(EngineDead, match=f"without {DRAFT}"):
        WeightSync(SmallEngine(weights(0, drafts=True)), **SMALL).update(weights(1).items(), 1, drafts="sent")
    sync.update(weights(1, drafts=True).items(), 1, drafts="sent")
    serves(engine, weights(1, drafts=True))
    sync.update(weights(2).items(), 2, drafts="kept")
    serves(engine, weights(1, drafts=True) | weights(2))
    with pytest.raises(Refused, match="no drafts"):
        WeightSync(SmallEngine(weights(0)), **SMALL).update(weights(1, drafts=True).items(), 1, drafts="sent")


def test_a_retry_of_what_the_engine_has_is_compared_and_not_sent() -> None:
    engine, sync = pair()
    sync.update(weights(1).items(), 1)
    engine.log.clear()
    assert not sync.update(weights(1).items(), 1).sent
    assert engine.log == ["pause", "reset_caches", "resume"]
    with pytest.raises(Refused, match="use a new version"):
        sync.update(weights(2).items(), 1)
    with pytest.raises(Refused, match="not after 1"):
        sync.update(weights(0).items(), 0)
    serves(engine, weights(1))


def test_attempts_send_everything_again() -> None:
    engine, sync = pair(SmallEngine, Fault("send", "truncated", nth=1), attempts=2)
    assert sync.update(lambda: iter(weights(1).items()), 1).attempts == 2
    serves(engine, weights(1))
    with pytest.raises(Refused, match="an iterator can be sent once"):
        sync.update(iter(weights(2).items()), 2)


def test_nothing_to_send_leaves_the_engine_alone() -> None:
    engine, sync = pair()
    with pytest.raises(Refused, match="no tensors"):
        sync.update([], 1)
    assert engine.log == []


NEW = weights(1)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (NEW, "of a dict its items"),
        ([(EMBEDDING, None)], f"{EMBEDDING} has no tensor here"),
        ([(name, tensor.numpy()) for name, tensor in NEW.items()], "expected .Hugging Face name, tensor"),
        ([(tensor, name) for name, tensor in NEW.items()], r"^\(tensor\(.* came; expected"),
        ([(name, tensor, 1) for name, tensor in NEW.items()], r"^\('model.*tensor.* came; expected"),
    ],
)
def test_what_is_no_tensor_leaves_the_engine_alone(tensors: Any, says: str) -> None:
    engine, sync = pair()
    with pytest.raises(Refused, match=says):
        sync.update(tensors, 1)
    assert engine.log == []


@pytest.mark.parametrize("kind", [SmallEngine, StagedEngine])
def test_a_tensor_that_is_lost_on_its_way_is_no_update(kind: type[Any]) -> None:
    """As on a rank that is given some tensors of an export and not all."""
    engine, sync = pair(kind)
    with pytest.raises(SyncError, match=f"{HEAD} has no tensor here"):
        sync.update([(EMBEDDING, NEW[EMBEDDING]), (HEAD, None)], 1)
    assert sync.state is State.SERVING
    serves(engine, weights(0))


def test_a_second_update_is_refused_while_one_is_under_way() -> None:
    engine = SmallEngine(weights(0, drafts=True))
    sync = WeightSync(engine, **SMALL)
    refused = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1, drafts=True).items()
        for other in (sync, WeightSync(engine, **SMALL)):
            with pytest.raises(Refused) as refusal:
                other.update(weights(2, drafts=True).items(), 2, drafts="sent")
            refused.append(str(refusal.value))

    sync.update(source(), 1, drafts="sent")
    assert [text.split(":")[0] for text in refused] == ["version 2", "an update has paused the engine already"]
    serves(engine, weights(1, drafts=True))


def test_another_sync_may_be_first() -> None:
    engine, sync = pair()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        WeightSync(engine, **SMALL).update(weights(2).items(), 2)
        yield from weights(1).items()

    with pytest.raises(Refused, match="serves version 2"):
        sync.update(source(), 1)
    serves(engine, weights(2))


def test_a_tensor_that_comes_twice_is_refused_in_the_same_bucket_or_another() -> None:
    (a, first), (b, second) = weights(1).items()
    for limit, twice, error in [
        (300, [(a, first), (b, second), (a, second)], "other tensors came since"),
        (1 << 20, [(a, first), (a, second), (b, second)], "came twice"),
    ]:
        engine, sync = pair(StagedEngine, bucket_bytes=limit)
        with pytest.raises((SyncError, BucketError), match=error):
            sync.update(twice, 1)
        serves(engine, weights(0))


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("staged", [False, True])
def test_a_source_that_fails_on_its_way(at: int, staged: bool) -> None:
    engine, sync = pair(StagedEngine if staged else SmallEngine)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        named = list(weights(1).items())
        yield from named[:at]
        if at == 2:
            yield "model.norm.weight", torch.ones(3)
        raise Broken("source")

    # The second tensor is asked for before the first bucket is there.
    expected = Broken if at == 1 else UpdateFailed if staged else EngineDead
    with pytest.raises(expected, match="source"):
        sync.update(source(), 1)
    if expected is not EngineDead:
        serves(engine, weights(0))


def test_a_source_that_hangs_is_told_by_the_state_before_it_returns() -> None:
    _, sync = pair()
    sync.timeouts = Timeouts(source=0.05)
    go = threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1).items()
        yield "model.norm.weight", torch.ones(3)
        go.wait(20)

    errors: list[BaseException] = []

    def run() -> None:
        try:
            sync.update(source(), 1)
        except EngineDead as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 10
    while sync.state is not State.DEAD and time.monotonic() < until:
        time.sleep(0.01)
    assert sync.state is State.DEAD
    assert "no bucket within 0.05 s" in sync.reason
    assert not errors
    go.set()
    thread.join(10)
    assert len(errors) == 1


def test_an_interrupt_declares_the_engine_dead() -> None:
    _, sync = pair()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1).items()
        yield "model.norm.weight", torch.ones(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync.update(source(), 1)
    assert sync.reason == "in state send: KeyboardInterrupt()"
    with pytest.raises(EngineDead, match="KeyboardInterrupt"):
        sync.update(weights(1).items(), 1)


def test_a_commit_whose_answer_is_lost_counts() -> None:
    engine, sync = pair(SmallEngine, Fault("commit", "raise after"))
    sync.update(weights(1).items(), 1)
    assert engine.log.count("commit") == 1
    serves(engine, weights(1))


class CountsFirst(StagedEngine):
    """Raises its version before it has the weights (TRL#5932)."""

    def begin(self, update: Any) -> None:
        super().begin(update)
        self.intake.version = update.version


def test_a_version_without_its_weights_is_not_resumed() -> None:
    engine, sync = pair(CountsFirst, Fault("send", "lost", once=False))
    with pytest.raises(EngineDead, match="has version 1, expected 0"):
        sync.update(weights(1).items(), 1)
    assert engine.paused


class RefusesTwice(SmallEngine):
    def begin(self, update: Any) -> None:
        if self.intake.update is not None:
            raise Refused("busy")
        super().begin(update)


def test_a_refusal_after_torn_weights_is_no_reason_to_resume() -> None:
    engine, sync = pair(RefusesTwice, Fault("send", "lost", nth=1), attempts=2)
    with pytest.raises(EngineDead, match="begin failed"):
        sync.update(weights(1).items(), 1)
    assert engine.paused


def test_no_state_leaves_death_and_every_state_leads_to_an_end() -> None:
    assert not any(may_follow(state, State.DEAD) for state in State)
    assert all(may_follow(State.DEAD, state) for state in State if state is not State.DEAD)
    reached, ahead = set(), {State.SERVING}
    while ahead:
        reached |= ahead
        ahead = {following for state in ahead for following in FOLLOWS[state]} - reached
    assert reached == set(State) - {State.DEAD}


KINDS = (SmallEngine, StagedEngine, SleepingEngine)
FAULTS = [
    (kind, call, how) for kind in KINDS for call in CALLS if hasattr(kind, call) for how in (*ANY, *OF.get(call, ()))
]


def expected(kind: type[Any], call: str, how: str, attempts: int) -> str:
    """How an update ends in which one call fails once."""
    if how.startswith("hang") or call in ("wake_weights", "wake_kv", "resume", "revert"):
        return "dead"
    if call == "pause":
        return "old"
    if call == "commit" and how in ("raise after", "nothing", "miscounted"):
        return "new" if how == "raise after" else "dead"  # its answer is lost; it says that it committed
    if attempts > 1:
        return "new"
    return "old" if kind is StagedEngine and call != "reset_caches" else "dead"


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize(
    ("kind", "call", "how"), FAULTS, ids=[f"{k.__name__}-{c}-{h}".replace(" ", "-") for k, c, h in FAULTS]
)
def test_every_fault_has_its_end(kind: type[Any], call: str, how: str, attempts: int) -> None:
    faults = [Fault(call, how), *([Fault("send", "lost", once=False)] if call == "revert" else [])]
    engine, sync = pair(kind, *faults, attempts=attempts, colocated=kind is SleepingEngine)
    begun = time.monotonic()
    end = outcome(sync, weights(1), 1)
    engine.released.set()
    assert time.monotonic() - begun < 10
    assert faults[0].fired
    assert end == expected(kind, call, how, attempts)
    look(engine, sync, {0: weights(0), 1: weights(1)})


def outcome(sync: WeightSync, given: Weights, version: int, **about: Any) -> str:
    """What the update says of itself."""
    try:
        sync.update(given.items(), version, **about)
        return "new"
    except UpdateFailed:
        return "old"
    except Refused:
        return "refused"
    except EngineDead:
        return "dead"


def look(engine: Any, sync: WeightSync, truth: dict[int, Weights]) -> None:
    """An engine that generates has all of the weights of its version, and no cache of others."""
    assert sync.state in (State.SERVING, State.DEAD)
    assert (sync.state is State.DEAD) == bool(sync.reason)
    assert sync.state is State.DEAD or not engine.paused
    if not engine.paused and not getattr(engine, "asleep", 0):
        serves(engine, truth[engine.version()])


def some_faults() -> st.SearchStrategy[list[Fault]]:
    """At most two, each in any call, once or in all calls from some call on."""
    kinds = [(call, how) for call in CALLS for how in (*ANY, *OF.get(call, ()))]
    one = st.tuples(st.sampled_from(kinds), st.integers(0, 2), st.booleans())
    return st.lists(one.map(lambda drawn: Fault(*drawn[0], *drawn[1:])), max_size=2)


class Updates(RuleBasedStateMachine):
    """Updates of an engine, any call of which may fail; it is restarted when it is dead."""

    @initialize(kind=st.sampled_from(KINDS), attempts=st.integers(1, 2))
    def start(self, kind: type[Any], attempts: int) -> None:
        self.kind, self.attempts = kind, attempts
        self.truth, self.newest = {0: weights(0)}, 0
        self.restart_at(0)

    def restart_at(self, version: int) -> None:
        self.engine = started(self.kind, self.truth[version], version)
        settings = {**SMALL, "attempts": self.attempts, "colocated": self.kind is SleepingEngine}
        self.sync, self.version = WeightSync(self.engine, **settings), version

    @property
    def dead(self) -> bool:
        return self.sync.state is State.DEAD

    @property
    def asleep(self) -> int:
        return getattr(self.engine, "asleep", 0)

    @precondition(lambda self: not self.dead)
    @rule(
        jump=st.integers(1, 3),
        seed=st.integers(1, 99),
        base=st.sampled_from(["none", "none", "right", "wrong"]),
        faults=some_faults(),
    )
    def update(self, jump: int, seed: int, base: str, faults: list[Fault]) -> None:
        version, about, given = self.newest + jump, {}, weights(seed)
        if base != "none":
            given = {HEAD: given[HEAD]}
            about = {"kind": "delta", "base": self.version + (base == "wrong")}
            version += 1  # a wrong base is an earlier version too
        self.engine.faults, self.sync.timeouts = faults, timeouts(faults)
        misfit = base == "wrong" or (base == "right" and self.asleep == 2)
        end = outcome(self.sync, given, version, **about)
        self.engine.released.set()
        self.newest, self.truth[version] = version, self.truth[self.version] | given
        assert (end == "refused") == misfit
        assert end in ("new", "refused") or any(fault.fired for fault in faults)
        self.version = version if end == "new" else self.version
        self.engine.faults = ()

    @precondition(lambda self: not self.dead and not self.asleep and self.engine.receipt() is not None)
    @rule(same=st.booleans())
    def repeat(self, same: bool) -> None:
        """What was sent last, or something else under its version."""
        given = self.truth[self.version]
        sent = {name: given[name] for name in (given if self.engine.receipt().tensors == len(given) else [HEAD])}
        again = {name: tensor if same else tensor + 1 for name, tensor in sent.items()}
        assert outcome(self.sync, again, self.version) == ("new" if same else "refused")

    @precondition(lambda self: not self.dead and self.asleep < 2 and self.version)
    @rule(back=st.integers(1, 3))
    def older(self, back: int) -> None:
        assert outcome(self.sync, weights(1), max(0, self.version - back)) == "refused"

    @precondition(lambda self: not self.dead and not self.asleep and self.kind is SleepingEngine)
    @rule(level=st.integers(1, 2))
    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    @precondition(lambda self: self.dead)
    @rule()
    def restart(self) -> None:
        self.restart_at(self.version)

    @invariant()
    def nothing_is_torn_or_stale(self) -> None:
        look(self.engine, self.sync, self.truth)
        if not self.dead and self.asleep < 2:
            assert self.engine.version() == self.version


Updates.TestCase.settings = settings(
    max_examples=int(os.environ.get("MOEREF_FUZZ", "25")),
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestUpdates = Updates.TestCase
