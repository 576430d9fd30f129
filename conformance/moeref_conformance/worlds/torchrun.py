"""Runs cells in the processes that torchrun started: that of rank 0 judges, and each forks one rank.

Each process calls `take_part`. That of rank 0 gathers the others (`coordinator.py`) and runs as it would alone, with a
`TorchrunWorld` in place of a world of its own. The others serve it (`worker.py`). The ranks of a cell meet in the store
that torchrun names. No file system is shared: inputs go out and records come back over the coordinator's connections.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, to_plain
from moeref_conformance.contract.exits import RankExit, RunOutcome, mark_first
from moeref_conformance.worlds.coordinator import Coordinator, address, join, prefix
from moeref_conformance.worlds.forked import ENTRY, START_SECONDS, WorldError
from moeref_conformance.worlds.messages import pack, unpack
from moeref_conformance.worlds.worker import Place, Worker

AGAIN_SECONDS = 0.5  # a failure is sent again after this: a fork server that has not begun its cell drops the message
SLACK_SECONDS = 90.0  # beyond deadline and grace: a process without an answer then counts as lost
#: Two machines begin a cell at most this many seconds apart: failures this close count as simultaneous.
SKEW_SECONDS = 0.5


def take_part(target_spec: str, judge: Callable[[Coordinator], int], entry: str = ENTRY) -> int:
    """Do the work of this process of torchrun, and return its exit code.

    Rank 0 calls `judge` and returns its code. The others serve rank 0, and return 0 when it tells them to stop, 2 if it
    is lost or at SIGTERM. Call it from the main thread.
    """
    place = Place.here()
    if place.rank == 0:
        with _interruptible(), Coordinator.gather(place, target_spec, entry) as coordinator:
            try:
                return judge(coordinator)
            finally:
                for rank, why in coordinator.gone.items():
                    print(f"moeref-conformance: {coordinator.name(rank)}: {why}", file=sys.stderr)
    try:
        with _ending():
            if Worker(place, target_spec, join(place, target_spec), entry).serve():
                return 0
            why = "the process of rank 0 is gone"
    except (WorldError, _Ended) as error:
        why = str(error)
    print(f"moeref-conformance: rank {place.rank} on {place.host}: {why}", file=sys.stderr)
    return 2


class TorchrunWorld:
    """Runs cells of one backend with one rank a process of torchrun: ranks 0 to W-1 for a cell of W.

    `deadline` and `grace` as in `ForkedWorld`. Use it as a context manager within the coordinator's own.
    """

    def __init__(self, coordinator: Coordinator, backend: str, *, deadline: float = 120.0, grace: float = 3.0) -> None:
        self.coordinator, self.backend, self.deadline, self.grace = coordinator, backend, deadline, grace
        self._cells = 0
        self._sent: dict[tuple[tuple[str, str], ...], tuple[int, set[int]]] = {}

    def __enter__(self) -> TorchrunWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.coordinator.tell(self.coordinator.places, {"close": self.backend})

    def start(self) -> None:
        """Start a fork server in every process. Raises WorldError with the reason one gave, BadInput if they differ."""
        answers = self.coordinator.ask(self.coordinator.places, {"start": self.backend}, START_SECONDS + SLACK_SECONDS)
        facts = {rank: answer["ready"] for rank, answer in answers.items()}
        self.coordinator.alike(
            {
                rank: {**found["versions"], "target": json.dumps(found["info"]), "claims": json.dumps(found["claims"])}
                for rank, found in facts.items()
            }
        )

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell; the records of all its ranks go to `<cell_dir>/rank0003/` here.

        Raises ValueError for a cell that `claims` does not cover, of another world, or of more ranks than there are.
        """
        coordinator, size = self.coordinator, cell.layout.world
        reason = claims.why_not(cell)
        if reason is None and cell.backend != self.backend:
            reason = f"this world is {self.backend}"
        if reason is None and size > len(coordinator.places):
            reason = f"it needs {size} ranks, and torchrun started {len(coordinator.places)}"
        if reason is not None:
            raise ValueError(f"cell {cell.id} must not be run: {reason}")
        begin = time.monotonic()
        ranks = range(size)
        if missing := self._missing(cell, ranks):
            return RunOutcome((), 0.0, error=missing)
        try:
            number = self._inputs(inputs, ranks)
        except WorldError as error:
            return RunOutcome((), time.monotonic() - begin, error=str(error))
        local: dict[int, dict[str, int]] = {}
        for rank in ranks:
            place = coordinator.places[rank]
            local.setdefault(place.node, {})[str(rank)] = place.local
        self._cells += 1
        request = {
            "cell": to_plain(cell),
            "deadline": self.deadline,
            "grace": self.grace,
            "inputs_of": f"{self.backend}-{number}",
            "local": {str(node): of for node, of in local.items()},
            "store": address(),
            "prefix": prefix(f"{self.backend}/cell{self._cells}"),
        }
        asked = coordinator.question(request)
        coordinator.tell(ranks[1:], asked)
        coordinator.tell(ranks[:1], {**asked, "files": inputs, "cell_dir": str(cell_dir.resolve())})
        answers = self._watch(ranks, asked["number"], cell_dir)
        if errors := [
            f"{coordinator.name(rank)}: {answer['error']}" for rank, answer in answers.items() if "error" in answer
        ]:
            return RunOutcome((), time.monotonic() - begin, error="\n".join(errors))
        if missing := self._missing(cell, ranks):
            return RunOutcome((), time.monotonic() - begin, error=missing)
        exits = [
            replace(RankExit(**end), host=coordinator.host(end["rank"])) for r in ranks for end in answers[r]["exits"]
        ]
        seconds = max(answer["seconds"] for answer in answers.values())
        return RunOutcome(merge(exits), seconds, strays=sum(answer["strays"] for answer in answers.values()))

    def _inputs(self, inputs: Mapping[str, str], ranks: range) -> int:
        """Send these files to the other processes that lack them, and return the number that names them there."""
        key = tuple(sorted(inputs.items()))
        number, have = self._sent.setdefault(key, (len(self._sent), set()))
        if lacking := set(ranks[1:]) - have:
            load = pack({name: Path(path) for name, path in inputs.items()})
            self.coordinator.ask(lacking, {"inputs": f"{self.backend}-{number}"}, START_SECONDS, load)
            have |= lacking
        return number

    def _watch(self, ranks: range, number: int, cell_dir: Path) -> dict[int, dict[str, Any]]:
        """The answers to a cell. A failure is sent to all ranks; when all have finished, they are told to leave."""
        coordinator, waiting, finished, answers = self.coordinator, set(ranks), set[int](), dict[int, dict[str, Any]]()
        until = time.monotonic() + self.deadline + self.grace + SLACK_SECONDS
        failed = left = False
        while waiting := waiting - set(coordinator.gone):
            for rank, message, load in coordinator.hear(waiting, number, AGAIN_SECONDS):
                if "finished" in message:
                    finished.add(rank)
                    continue
                answers[rank] = message
                waiting.discard(rank)
                if load:
                    unpack(load, cell_dir)
                failed = failed or not _well(message)
            failed = failed or not coordinator.gone.keys().isdisjoint(ranks)
            if failed:
                coordinator.tell(waiting, {"end": True})
            elif not left and finished >= set(ranks):
                coordinator.tell(waiting, {"leave": True})
                left = True
            if time.monotonic() > until:
                for rank in waiting:
                    coordinator.lose(rank, "it gives no answer")
        return answers

    def _missing(self, cell: Cell, ranks: range) -> str:
        """Which of these ranks have no process any more, and why; empty if all have."""
        from moeref_conformance.contract.topology import coords_text

        return "\n".join(
            f"{self.coordinator.name(rank, coords_text(cell.layout, rank))}: {self.coordinator.gone[rank]}"
            for rank in ranks
            if rank in self.coordinator.gone
        )


def merge(exits: Iterable[RankExit]) -> tuple[RankExit, ...]:
    """How the ranks of a cell ended, from several machines, with the first failure marked.

    Their clocks differ a little: of failures that may have come at once, a death counts as the first.
    """
    found = list(exits)
    own = [e.seen for e in found if e.kind in ("died", "raised") and not e.echo]
    begun = min(own, default=0.0)
    return mark_first([replace(e, seen=begun) if begun <= e.seen < begun + SKEW_SECONDS else e for e in found])


def _well(answer: Mapping[str, Any]) -> bool:
    return "error" not in answer and all(RankExit(**end).kind == "ok" for end in answer["exits"])


@contextmanager
def _interruptible() -> Iterator[None]:
    """Handle SIGTERM, which torchrun sends when another process has died, like Ctrl-C, and either only once."""

    def interrupt(number: int, frame: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handling({signal.SIGINT: interrupt, signal.SIGTERM: interrupt}):
        yield


class _Ended(Exception):
    """This process was told to end."""


@contextmanager
def _ending() -> Iterator[None]:
    """Raise _Ended at SIGTERM. Ignore Ctrl-C, which goes to all processes: rank 0 decides when the others end."""

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Ended("it was ended by SIGTERM")

    with _handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: end}):
        yield


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
