"""How the ranks of a cell ended.

Nothing here imports torch, so that the parent process can read an outcome without it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

#: Exit code of a rank in which something raised; the record of the step says what.
EXIT_RAISED = 3


@dataclass(frozen=True)
class RankExit:
    """How one rank of a cell ended.

    `code` is its exit code (None if a signal ended it), `signal` the signal number (None if it exited).
    `timed_out`: it was still running when the deadline of the cell passed; the world then ended it.
    `last_step` is the step of its last event ("start" before the first one), `stderr_tail` the end of its stderr,
    `coords` its place in the layout such as "tp0 pp1 ep1 etp0 dp0".
    `first`: it failed before the others did, so it is the place to look at; later failures are often only peers
    that lost their connection. When ranks hang, the ones furthest behind are marked.
    `killed`: the world ended it after another rank had failed; `signal` then says nothing about the rank itself.
    `finished`: it reported the end of its work. A rank that leaves with code 0 but did not finish is a failure.
    `echo`: its exception only says that a peer is gone. `seen` is when the world saw that it had failed, `raised` when
    its exception came (0 without one), both in seconds since the cell began there. `events` counts its events.
    `waits`: it hung inside a collective. `host` is its machine, where there are several.
    """

    rank: int
    code: int | None = 0
    signal: int | None = None
    timed_out: bool = False
    last_step: str = "start"
    stderr_tail: str = ""
    coords: str = ""
    first: bool = False
    killed: bool = False
    finished: bool = False
    echo: bool = False
    seen: float = 0.0
    raised: float = 0.0
    events: int = 0
    waits: bool = False
    host: str = ""

    @property
    def kind(self) -> Literal["ok", "raised", "died", "hung", "killed"]:
        """ok, raised (a Python exception), died (a signal or an exit of its own), hung (deadline), killed (victim)."""
        if self.finished and self.code == 0:
            return "ok"
        if self.timed_out:
            return "hung"
        if self.killed:
            return "killed"
        return "raised" if self.code == EXIT_RAISED else "died"

    @property
    def text(self) -> str:
        """For people: `rank 1 (tp1 pp0) died in step load: SIGKILL`."""
        where = self.coords + (f" on {self.host}" if self.host else "")
        place = f"rank {self.rank}" + (f" ({where.strip()})" if where else "")
        step = f"in step {self.last_step}"
        how = f"exit code {self.code}" if self.signal is None else signal_name(self.signal)
        said = {
            "ok": "finished",
            "raised": f"raised {step}",
            "hung": f"hung {step} until the deadline",
            "killed": f"was ended {step} because another rank had failed",
            "died": f"left with exit code 0 {step} before its work was over"
            if self.code == 0
            else f"died {step}: {how}",
        }
        return f"{place} {said[self.kind]}"


@dataclass(frozen=True)
class RunOutcome:
    """A world's result for one cell. `error` is a failure of the kit itself: there is no verdict on the target.

    `strays` counts processes that the target had left behind and the world ended after the cell.
    `events` holds, by rank, the record of a world that keeps it in memory instead of in the cell's folder.
    `written` has a text for each input that the ranks changed, such as `checkpoint/config.json was changed`.
    """

    exits: tuple[RankExit, ...]
    seconds: float
    error: str = ""
    strays: int = 0
    events: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Every rank finished."""
        return not self.error and bool(self.exits) and all(e.kind == "ok" for e in self.exits)


def mark_first(exits: Sequence[RankExit]) -> tuple[RankExit, ...]:
    """The exits with `first` set: on the failure that came before the others, or on the hung ranks furthest behind.

    Echoes come last. Of failures seen at the same time a death comes before exceptions, since it broke the connections.
    Of hung ranks with equally few events, the others wait for those that are not inside a collective.
    """
    own = [e for e in exits if e.kind in ("died", "raised")]
    hung = [e for e in exits if e.timed_out]
    first: set[int] = set()
    # On another machine a hung rank may be ended a moment before the deadline comes for those that wait for it.
    if own and not (hung and all(e.echo for e in own)):
        first = {min(own, key=lambda e: (e.echo, e.seen, e.raised)).rank}
    elif hung:
        behind = min(e.events for e in hung)
        last = [e for e in hung if e.events == behind]
        first = {e.rank for e in [e for e in last if not e.waits] or last}
    return tuple(replace(e, first=e.rank in first) for e in exits)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 34` where the platform has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
