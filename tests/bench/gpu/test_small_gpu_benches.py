"""Every bench on the CPU with a few channels: the code runs, and each comparison notices a changed side.

Nothing is measured here. What has no kernel on a CPU (Transformer Engine, DeepEP, the fused router) is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moeref_conformance.worlds.forked import ForkedWorld

from tests.bench.gpu import forward, ranks
from tests.bench.gpu.figures import Disagreement

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
OF_RANKS = {"exchange": 3}
WITHOUT_VALUE = ("cannot be run here", "needs Transformer Engine", "less than the spread")


@pytest.fixture(scope="module")
def cpu() -> Iterator[ForkedWorld]:
    with ranks.world("gloo") as world:
        yield world


@pytest.mark.parametrize("name", [name for name in ranks.BENCHES if name != "forward"])
def test_runs_and_notices(name: str, cpu: ForkedWorld, tmp_path: Path) -> None:
    how = {"sizes": "narrow", "ranks": OF_RANKS.get(name, 1)}
    found = ranks.measure(cpu, name, tmp_path / "good", **how)  # type: ignore[arg-type]
    assert found
    for figure in found:
        assert figure.value is not None or figure.note.startswith(WITHOUT_VALUE)
    if name == "recipes":  # a CPU takes any number of rows: `test_gpu_table` has a kernel that refuses
        return
    with pytest.raises(RuntimeError, match="Disagreement"):
        ranks.measure(cpu, name, tmp_path / "spoiled", spoil=True, **how)  # type: ignore[arg-type]


def test_forward(cpu: ForkedWorld, tmp_path: Path) -> None:
    for run in ("one", "again", "spoiled"):
        ranks.measure(cpu, "forward", tmp_path / run, sizes="narrow", spoil=run == "spoiled")
    one, again, spoiled = (tmp_path / run / "rank0000" for run in ("one", "again", "spoiled"))
    assert [figure.value for figure in forward.compare(again, one)] == [0, 0, 0]
    with pytest.raises(Disagreement, match="logits differ"):
        forward.compare(spoiled, one)
