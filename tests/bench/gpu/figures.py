"""What benches on a GPU find: figures held against something, how these are timed and compared, and their file.

The file (`bench-gpu.json`) has `about` (versions, device, date, command) and `benches`: by name, either `figures` or
`skipped`, a reason. A bench that is run again replaces its own entry.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

#: The folder of the file, where not conformance-report/.
FOLDER = "MOEREF_BENCH_OUT"
NAME = "bench-gpu.json"


class Disagreement(AssertionError):
    """Two sides of a bench that must compute the same do not; a time next to it would say nothing."""


@dataclass(frozen=True)
class Figure:
    """One row of the table: `value` in `unit` of `what`, next to `against`. Without a value, `note` says why."""

    what: str
    value: float | None
    unit: str = ""
    against: str = ""
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """The median of several rounds in seconds, and the distance of their quartiles as a share of it."""

    seconds: float
    spread: float


def timed(device: torch.device, *calls: Callable[[], Any], rounds: int = 9, warmup: int = 2) -> list[Timing]:
    """Time `calls` in turns, so that a busy machine is as busy for all: CUDA events there, the clock on a CPU."""
    for _ in range(warmup):
        for call in calls:
            call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(found, calls, strict=True):
            times.append(_seconds(device, call))
    return [Timing(statistics.median(times), _spread(times)) for times in found]


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, middle, last = statistics.quantiles(times, n=4)
    return (last - first) / middle


def ratio(what: str, mine: Timing, other: Timing, against: str) -> Figure:
    """Time of `what` over the time of what it is held against; the note has the times and the wider spread."""
    spread = max(mine.spread, other.spread)
    note = f"{mine.seconds * 1e3:.3g} ms against {other.seconds * 1e3:.3g} ms, quartiles {spread:.0%} apart"
    return Figure(what, mine.seconds / other.seconds, "× time", against, note)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """‖got − expected‖ / ‖expected‖ in fp64; infinite for other shapes and for anything that is not a number."""
    if got.shape != expected.shape:
        return float("inf")
    a, b = got.detach().double(), expected.detach().double()
    found = float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return found if found == found else float("inf")


def close(what: str, got: torch.Tensor, expected: torch.Tensor, most: float, against: str) -> Figure:
    """The distance of two results as a figure. Raises Disagreement if it is more than `most`."""
    found = distance(got, expected)
    if not found <= most:
        raise Disagreement(f"{what} is {found:.2e} away from {against}, allowed are {most:.0e}")
    return Figure(what, found, "relative difference", against, f"allowed: {most:.0e}")


def path() -> Path:
    """The file of figures."""
    return Path(os.environ.get(FOLDER, "conformance-report")) / NAME


def save(file: Path, bench: str, entry: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Put one bench's `{"figures": [...]}` or `{"skipped": reason}` into `file`, in place of an earlier one."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"benches": {}}
    known |= {"about": dict(about)}
    known["benches"][bench] = dict(entry)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plain(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Figures as JSON takes them."""
    return [asdict(figure) for figure in figures]
