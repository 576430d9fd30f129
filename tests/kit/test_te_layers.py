"""`kernels="te"` on a CPU: megatron-core's own Transformer Engine spec over the kit's stand-in for that package.

Names, shapes, marks and wiring are real; kernels and quantisation are not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Bench
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.forked import ForkedWorld

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is not None,
        reason="Transformer Engine is installed: its own cells run on a GPU",
    ),
]
#: Run when a Python starts, so that the stand-in is there before megatron-core looks for the package.
SITE = """
import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
from moeref_conformance.targets.peers import te

te.install()
"""
WIDE = Layout(tp=2, pp=2, ep=2, etp=1)


def cell(family: str, name: str, layout: Layout, experts: str = "sequential", mtp: int = 0) -> Cell:
    return Cell(
        family=family,
        layout_name=name,
        layout=layout,
        layers=4,
        kernels="te",
        norms="fused",
        experts=experts,
        mtp=mtp,
    )


CELLS = (
    cell("qwen3_moe", "tp2-pp2-ep2-etp1", WIDE, experts="grouped"),
    cell("deepseek_v3", "tp2", Layout(tp=2)),
    cell("gpt_oss", "ep2", Layout(ep=2), experts="grouped"),
    cell("qwen3_next", "one", Layout()),
    cell("glm4_moe", "tp2", Layout(tp=2), mtp=1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cells")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Bench]:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))  # the world's process gets this path
        patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        with ForkedWorld("moeref", deadline=240) as world:
            world.start()
            yield Bench(world, folder, MoerefTarget())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_every_rule_holds(cell: Cell, bench: Bench) -> None:
    outcomes = bench.judge(cell, deadline=240)
    found = {rule: outcome.findings[0] for rule, outcome in outcomes.items() if outcome.findings}
    assert not found
    assert outcomes["FWD-001"].met
