"""What the ranks of one cell left behind, read back: events, tensors, and which rank failed first.

A record folder is `<cell_dir>/rank0003/` with `events.jsonl` (one object a line: step, phase, at, seconds, value and
error) and one `<step>.safetensors` for every step that has tensors. `steps/run.py` writes it; judges read it through
`RankRecord`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeref_conformance.contract.api import Cell, to_plain
from moeref_conformance.contract.checks import BadInput, read_json_lines
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.hang_stacks import crashed, last_lines, waits
from moeref_conformance.contract.texts import cut

if TYPE_CHECKING:
    import torch

EVENTS = "events.jsonl"
#: Characters kept of a message in a record: judges look for names in it.
MESSAGE = 100_000
#: In these steps the target must raise.
REFUSALS = ("refuse_parameter", "refuse_buffer", "refuse_extra", "refuse_missing", "refuse_unlike", "refuse_routes")


def digest(tensor: torch.Tensor) -> str:
    """A hash of the bytes of a contiguous tensor on the CPU, whatever its shape and dtype.

    numpy then refers to the tensor's storage, which can no longer be resized: give it a copy of what has to move later.
    """
    import torch

    return hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Crash:
    """A rank that did not finish.

    `kind` is raised (an error in Python), died (exit code or signal), hung (deadline) or killed (ended by the world
    because another rank had failed).
    """

    rank: int
    step: str
    kind: str
    detail: str
    coords: str


@dataclass
class RankRecord:
    """The record of one rank. `events` is read from the folder unless given."""

    rank: int
    dir: Path

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What the rank wrote to `events.jsonl`, without a last line that its death cut off.

        Raises `BadInput` naming a line that is no event.
        """
        path = self.dir / EVENTS
        rows = read_json_lines(path) if path.exists() else []
        for number, row in enumerate(rows, 1):
            if not _is_event(row):
                raise BadInput(f"{path}:{number}: not an event with a step and a phase: {row!s:.80}")
        return rows

    def _event(self, step: str, phase: str) -> dict[str, Any] | None:
        return next((e for e in self.events if e["step"] == step and e["phase"] == phase), None)

    def has(self, step: str) -> bool:
        """Whether the step ended without an error."""
        return self._event(step, "ok") is not None

    def value(self, step: str) -> Any:
        """The value of a step that ended well; KeyError names the step otherwise."""
        event = self._event(step, "ok")
        if event is None:
            raise KeyError(f"rank {self.rank} has no record of step {step}")
        return event.get("value")

    def error(self, step: str) -> dict[str, str] | None:
        """`{"type", "message", "traceback"}` of a step that raised, else None."""
        event = self._event(step, "raised")
        return None if event is None else event["error"]

    def tensors(self, step: str) -> dict[str, torch.Tensor]:
        """The tensors of a step by key, on CPU; empty if it has none."""
        from safetensors.torch import load_file

        path = self.dir / f"{step}.safetensors"
        return load_file(path) if path.exists() else {}

    def tensor(self, step: str, key: str) -> torch.Tensor | None:
        """One tensor of a step, on CPU; None if the step has none of this key."""
        from safetensors import safe_open

        path = self.dir / f"{step}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118 -- it is no mapping

    @property
    def last_step(self) -> str:
        """The step that began last, or `start`."""
        return str(self.events[-1]["step"]) if self.events else "start"


def _is_event(row: Any) -> bool:
    texts = [row.get("step"), row.get("phase")] if isinstance(row, dict) else [None]
    if "raised" in texts[1:]:
        error = row.get("error")
        texts += [error.get("type"), error.get("message")] if isinstance(error, dict) else [None]
    return all(isinstance(text, str) for text in texts)


def _crash(record: RankRecord, end: RankExit) -> tuple[tuple[bool, bool, float], Crash] | None:
    """The crash of a rank with a key that sorts the first failure first, or None if the rank finished."""
    # At the deadline the stacks' signal may wake a rank from a native sleep: what it does then is not its own doing.
    events = record.events[: end.events] if end.timed_out else record.events
    raised = next((e for e in events if e["phase"] == "raised" and e["step"] not in REFUSALS), None)
    if raised is None and end.kind == "ok":
        return None
    at = float(events[-1].get("at", 0.0)) if events else 0.0
    tail = crashed(end.stderr_tail) or " | ".join(last_lines(end.stderr_tail))
    kind, step, detail = end.kind, end.last_step or record.last_step, f"{end.text}. {tail}"
    if kind == "hung":
        detail = waits(end.stderr_tail) or detail
    if raised is not None:
        kind, step, at = "raised", raised["step"], float(raised.get("at", at))
        detail = f"{raised['error']['type']}: {raised['error']['message']}"
    if end.host and end.host not in detail:
        detail = f"on {end.host}: {detail}"
    # Neither comes first: a hung rank usually waits for others, a killed one was ended after another had failed.
    late = math.inf if kind in ("hung", "killed") else at
    return (not end.first, kind == "killed", late), Crash(end.rank, step, kind, detail, end.coords)


@dataclass
class Observation:
    """All that is known of one run of one cell. `crashes` begins with the rank that failed first.

    `written` has a text for each input that the ranks changed, such as `checkpoint/config.json was changed`.
    """

    cell: Cell
    ranks: list[RankRecord]
    crashes: list[Crash] = field(default_factory=list)
    seconds: float = 0.0
    written: tuple[str, ...] = ()

    @classmethod
    def read(cls, cell: Cell, cell_dir: Path, outcome: RunOutcome) -> Observation:
        """Read `cell_dir/rank*`, or the events kept in memory, with what the world says of each process.

        Crashes are in the order of failure: those the world saw fail first, then by the time of the last event; ranks
        that hung or were ended by the world come last.
        """
        ranks, crashes = [], []
        for end in sorted(outcome.exits, key=lambda e: e.rank):
            record = RankRecord(end.rank, rank_dir(cell_dir, end.rank))
            if outcome.events:
                record.events = outcome.events.get(end.rank, [])
            ranks.append(record)
            if crash := _crash(record, end):
                crashes.append(crash)
        crashes.sort(key=lambda c: (c[0], c[1].rank))
        return cls(cell, ranks, [c for _, c in crashes], outcome.seconds, outcome.written)


def event(step: str, phase: str, began: float | None = None, **more: Any) -> dict[str, Any]:
    """A line of `events.jsonl`: what happens now in a step that began then."""
    now = time.time()
    return {"step": step, "phase": phase, "at": now, "seconds": round(now - (began or now), 6), **more}


def error_record(error: BaseException) -> dict[str, str]:
    """An error as an event has it. Call it where the error is handled."""
    told = {"message": str(error), "traceback": traceback.format_exc()}
    return {"type": type(error).__name__, **{key: cut(text, MESSAGE, MESSAGE // 2) for key, text in told.items()}}


def write_events(cell_dir: Path, events: Mapping[int, list[dict[str, Any]]]) -> None:
    """Write records that were kept in memory to the folders where other worlds write theirs."""
    for rank, lines in events.items():
        folder = rank_dir(cell_dir, rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EVENTS).write_text("".join(json.dumps(to_plain(line)) + "\n" for line in lines), encoding="utf-8")


def free_key(taken: Mapping[str, Any], name: str) -> str:
    """`name`, or `name#2`, `name#3`, … for a tensor that a stream sends again."""
    names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(free for free in names if free not in taken)


def rank_dir(cell_dir: Path, rank: int) -> Path:
    """The record folder of a rank of a cell."""
    return cell_dir / f"rank{rank:04d}"
