"""Steps with megatron-core's own auxiliary loss are green: the fault that scales it is red for nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moeref_conformance.contract.api import Cell
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.training import BALANCED, with_auxiliary_loss
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld) -> Iterator[Bench]:
    with Shared(shared_world, "moeref_conformance.selftest.training:with_auxiliary_loss", grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("balanced"), with_auxiliary_loss())


@pytest.mark.parametrize("where", [BALANCED.cell, cell("qwen3_moe", "ep2")], ids=lambda where: where.id)
def test_megatron_s_own_auxiliary_loss_is_green(bench: Bench, where: Cell) -> None:
    outcomes = bench.judge(where, one_rank=True)
    assert not outcomes["GRD-001"].findings
    assert not outcomes["GRD-001"].untested
