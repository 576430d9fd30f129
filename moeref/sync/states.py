"""The states of a weight update, which may follow which, and how long each may take."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class State(enum.Enum):
    """What a weight update is asking of the engine. Calls are named as in `Engine`, and as in `Timeouts`."""

    SERVING = "serving"
    PAUSE = "pause"
    WAKE_WEIGHTS = "wake_weights"
    BEGIN = "begin"
    SEND = "send"
    COMMIT = "commit"
    RESET = "reset_caches"
    REVERT = "revert"
    WAKE_KV = "wake_kv"
    RESUME = "resume"
    DEAD = "dead"


_S = State
#: Which states may follow a state. DEAD may follow each but itself, and is never left.
FOLLOWS: Mapping[State, frozenset[State]] = {
    _S.SERVING: frozenset({_S.PAUSE}),
    # RESET: the engine has this version already. RESUME: it may be half paused. SERVING: it refused to pause.
    _S.PAUSE: frozenset({_S.WAKE_WEIGHTS, _S.BEGIN, _S.RESET, _S.RESUME, _S.SERVING}),
    _S.WAKE_WEIGHTS: frozenset({_S.BEGIN, _S.RESET}),
    # BEGIN again is another attempt. From here on, until COMMIT has returned, weights may be torn.
    _S.BEGIN: frozenset({_S.SEND, _S.BEGIN, _S.REVERT, _S.RESET, _S.RESUME}),
    _S.SEND: frozenset({_S.SEND, _S.COMMIT, _S.BEGIN, _S.REVERT}),
    _S.COMMIT: frozenset({_S.RESET, _S.BEGIN, _S.REVERT}),
    _S.RESET: frozenset({_S.RESET, _S.WAKE_KV, _S.RESUME}),
    _S.REVERT: frozenset({_S.RESET, _S.RESUME}),
    _S.WAKE_KV: frozenset({_S.RESUME}),
    _S.RESUME: frozenset({_S.SERVING}),
    _S.DEAD: frozenset(),
}


def may_follow(state: State, after: State) -> bool:
    """Whether `state` may follow `after`."""
    return state in FOLLOWS[after] or (state is State.DEAD and after is not State.DEAD)


@dataclass(frozen=True)
class Timeouts:
    """Seconds that each call may take; None waits for ever, in the caller's thread.

    `source` is the time to make the next bucket of the trainer's tensors, `query` the time to read version or receipt.
    """

    query: float | None = 60
    pause: float | None = 600
    wake_weights: float | None = 120
    begin: float | None = 120
    source: float | None = 600
    send: float | None = 600
    commit: float | None = 600
    reset_caches: float | None = 60
    revert: float | None = 120
    wake_kv: float | None = 120
    resume: float | None = 60
