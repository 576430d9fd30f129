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
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Claims
from moeref_conformance.contract.exits import RankExit, RunOutcome, mark_first
from moeref_conformance.worlds import interrupts, static
from moeref_conformance.worlds.coordinator import Coordinator, address, join, prefix
from moeref_conformance.worlds.forked import ENTRY, START_SECONDS, WorldError, check_runs_here
from moeref_conformance.worlds.inputs import fingerprint
from moeref_conformance.worlds.messages import pack, unpack
from moeref_conformance.worlds.rank import FINISHED, CellRun, Part
from moeref_conformance.worlds.worker import Place, Worker

AGAIN_SECONDS = 0.5  # a failure is sent again after this: a fork server that has not begun its cell drops the message
SLACK_SECONDS = 90.0  # beyond deadline and grace: a process without an answer then counts as lost
#: Two machines begin a cell at most this many seconds apart: failures this close count as simultaneous.
SKEW_SECONDS = 0.5


def take_part(target_spec: str, judge: Callable[[Coordinator], int], entry: str = ENTRY) -> int:
    """Do the work of this process of torchrun, and return its exit code.

    Rank 0 calls `judge` and returns its code. The others serve rank 0, and return 0 when it tells them to stop, 2 if it
    is lost or at SIGTERM. Call it from the main thread, within `interrupts.raised`: torchrun sends SIGTERM to rank 0 as
    well, when another process has died.
    """
    place = Place.here()
    if place.rank == 0:
        with Coordinator.gather(place, target_spec, entry) as coordinator:
            try:
                return judge(coordinator)
            finally:
                for rank, why in coordinator.gone.items():
                    print(f"moeref-conformance: {coordinator.name(rank)}: {why}", file=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: rank 0 decides when the others end
    try:
        with interrupts.raised(lambda: WorldError("it was ended by SIGTERM"), (signal.SIGTERM,)):
            if Worker(place, target_spec, join(place, target_spec), entry).serve():
                return 0
        why = "the process of rank 0 is gone"
    except WorldError as error:
        why = str(error)
    print(f"moeref-conformance: rank {place.rank} on {place.host}: {why}", file=sys.stderr)
    return 2


class TorchrunWorld(AbstractContextManager["TorchrunWorld"]):
    """Runs cells of one backend with one rank a process of torchrun: ranks 0 to W-1 for a cell of W.

    `deadline` and `grace` as in `ForkedWorld`. Use it as a context manager within the coordinator's own.
    """

    def __init__(self, coordinator: Coordinator, backend: str, *, deadline: float = 120.0, grace: float = 3.0) -> None:
        self.coordinator, self.backend, self.deadline, self.grace = coordinator, backend, deadline, grace
        self._cells = 0
        #: By fingerprint of inputs: the name that they have in the other processes, and the ranks that hold them.
        self._sent: dict[tuple[tuple[str, str, str], ...], tuple[str, set[int]]] = {}

    def __exit__(self, *_: object) -> None:
        self.coordinator.tell(self.coordinator.places, "close", self.backend)

    def begin(self) -> None:
        """As `start`."""
        self.start()

    def start(self) -> dict[str, Any]:
        """Start a fork server in every process, and return the facts that all gave.

        Raises WorldError with the reason one gave, BadInput if they differ.
        """
        ranks, seconds = self.coordinator.places, START_SECONDS + SLACK_SECONDS
        facts = self.coordinator.ask(ranks, "start", self.backend, seconds=seconds)
        self.coordinator.alike(
            {
                rank: {**found["versions"], "target": json.dumps(found["info"]), "claims": json.dumps(found["claims"])}
                for rank, found in facts.items()
            }
        )
        return {name: facts[0][name] for name in ("versions", "info", "claims")}

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell; the records of all its ranks go to `<cell_dir>/rank0003/` here.

        Raises ValueError for a cell that `claims` does not cover, of another world, or of more ranks than there are.
        """
        check_runs_here(cell, claims, self.backend)
        ranks, have = range(cell.processes), len(self.coordinator.places)
        if len(ranks) > have:
            raise ValueError(f"cell {cell.id} needs {len(ranks)} ranks, and torchrun started {have}")
        begin = time.monotonic()
        try:
            outcomes = self._fork(cell, cell_dir, inputs, ranks)
        except WorldError as error:
            return RunOutcome((), time.monotonic() - begin, error=str(error))
        exits = [replace(e, host=self.coordinator.host(e.rank)) for outcome in outcomes for e in outcome.exits]
        outcome = RunOutcome(
            merge(exits),
            max(outcome.seconds for outcome in outcomes),
            strays=sum(o.strays for o in outcomes),
            written=tuple(dict.fromkeys(what for o in outcomes for what in o.written)),
        )
        return static.answered(outcome, cell_dir) if cell.backend == "static" else outcome

    def _fork(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], ranks: range) -> list[RunOutcome]:
        """Run the cell and unpack the records. Raises WorldError if a process is gone or a fork server failed."""
        self._check_there(cell, ranks)
        name, have = self._send(inputs, ranks)
        self._cells += 1
        part = Part(ranks, {}, address(), prefix(f"{self.backend}/cell{self._cells}"))
        request = CellRun(cell, cell_dir.resolve(), inputs, part, self.deadline, self.grace)
        answers = self._watch(
            ranks, self.coordinator.tell(ranks, "fork", self.backend, name, request, self.coordinator.places)
        )
        if errors := [f"{self.coordinator.name(r)}: {a}" for r, a in answers.items() if isinstance(a, WorldError)]:
            raise WorldError("\n".join(errors))
        self._check_there(cell, ranks)
        for rank, (outcome, record) in answers.items():
            unpack(record, cell_dir)
            if outcome.written:
                have.discard(rank)
        return [answers[rank][0] for rank in ranks]

    def _send(self, inputs: Mapping[str, str], ranks: range) -> tuple[str, set[int]]:
        """Send these files to the other processes that lack them. Returns their name there, and who has them."""
        name, have = self._sent.setdefault(fingerprint(inputs), (f"{self.backend}-{len(self._sent)}", set()))
        if lacking := set(ranks[1:]) - have:
            files = pack({name: Path(path) for name, path in inputs.items()})
            self.coordinator.ask(lacking, "keep", name, files, seconds=START_SECONDS)
            have |= lacking
        return name, have

    def _watch(self, ranks: range, number: int) -> dict[int, Any]:
        """The answers to a cell. A failure is sent to all ranks; when all have finished, they are told to leave."""
        coordinator, waiting, finished, answers = self.coordinator, set(ranks), set[int](), dict[int, Any]()
        until = time.monotonic() + self.deadline + self.grace + SLACK_SECONDS
        failed = left = False
        while waiting := waiting - coordinator.gone.keys() - answers.keys():
            for rank, answer in coordinator.hear(waiting, number, AGAIN_SECONDS):
                if answer == FINISHED:
                    finished.add(rank)
                else:
                    answers[rank] = answer
                    failed = failed or isinstance(answer, WorldError) or not answer[0].ok
            failed = failed or not coordinator.gone.keys().isdisjoint(ranks)
            if failed:
                coordinator.tell(waiting, "end")
            elif not left and finished >= set(ranks):
                coordinator.tell(waiting, "leave")
                left = True
            if time.monotonic() > until:
                for rank in waiting - answers.keys():
                    coordinator.lose(rank, "it gives no answer")
        return answers

    def _check_there(self, cell: Cell, ranks: range) -> None:
        """Raise WorldError saying which of these ranks have no process any more, and why."""
        from moeref_conformance.contract.topology import coords_text

        gone = {rank: self.coordinator.gone[rank] for rank in ranks if rank in self.coordinator.gone}
        if gone:
            told = (f"{self.coordinator.name(r, coords_text(cell.layout, r))}: {why}" for r, why in gone.items())
            raise WorldError("\n".join(told))


def merge(exits: Iterable[RankExit]) -> tuple[RankExit, ...]:
    """How the ranks of a cell ended, from several machines, with the first failure marked.

    Their clocks differ a little: of failures that may have come at once, a death counts as the first.
    """
    found = list(exits)
    own = [e.seen for e in found if e.kind in ("died", "raised") and not e.echo]
    begun = min(own, default=0.0)
    return mark_first([replace(e, seen=begun) if begun <= e.seen < begun + SKEW_SECONDS else e for e in found])
