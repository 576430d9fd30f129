"""The benches on a GPU, at published widths; figures go to `bench-gpu.json` in $MOEREF_BENCH_OUT (conformance-report/).

Run by `pytest -m gpu tests/bench/gpu -s`; `python -m tests.bench.gpu.table` makes the table of the file. A bench fails
if two sides that must agree do not; what needs more than this machine has is skipped, with the reason, and stands so
in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moeref_conformance.plan import machine
from moeref_conformance.worlds.forked import ForkedWorld
from rich.console import Console

from tests.bench.gpu import forward, ranks
from tests.bench.gpu.figures import Figure, path, plain, save
from tests.bench.gpu.needs import about, lacking

pytestmark = [pytest.mark.gpu, pytest.mark.bench, pytest.mark.ranks]


@pytest.fixture(scope="module")
def here() -> machine.Machine:
    return machine.detect()


@pytest.fixture(scope="module")
def worlds(here: machine.Machine) -> Iterator[dict[str, ForkedWorld]]:
    with ranks.world("nccl") as gpu, ranks.world("gloo") as cpu:
        yield {"gpu": gpu, "cpu": cpu}


@pytest.mark.parametrize("name", ranks.BENCHES)
def test_on_a_gpu(name: str, here: machine.Machine, worlds: dict[str, ForkedWorld], tmp_path: Path) -> None:
    if reason := lacking(name, here):
        if here.count:
            save(path(), name, {"skipped": reason}, about(here))
        pytest.skip(reason)
    size = min(here.count, 8) if name == "exchange" else 1
    found = ranks.measure(worlds["gpu"], name, tmp_path / "gpu", sizes="published", ranks=size)
    if name == "forward":
        ranks.measure(worlds["cpu"], name, tmp_path / "cpu", sizes="published")
        found = forward.compare(tmp_path / "gpu" / "rank0000", tmp_path / "cpu" / "rank0000")
    save(path(), name, {"figures": plain(found)}, about(here))
    Console(width=140).print(*(_line(figure) for figure in found), sep="\n")


def _line(figure: Figure) -> str:
    value = "–" if figure.value is None else f"{figure.value:.3g} {figure.unit}"
    return f"  {figure.what}: {value}" + (f", against {figure.against}" if figure.against else "") + f"  {figure.note}"
