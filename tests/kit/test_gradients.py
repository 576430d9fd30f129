"""Gradients: what only a backward pass shows, and that the kit notices it where the installed megatron-core has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.plan import matrix
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.training import SILENT, silent
from moeref_conformance.steps import gradients
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

#: Both of `SILENT` are fixed between the two versions that the project is tested with.
WRONG = tuple(int(part) for part in version("megatron-core").split(".")[:2]) < (0, 19)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld, variants: Path) -> Iterator[Bench]:
    with Shared(shared_world, "moeref_conformance.selftest.training:silent", grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("silent"), silent, inputs=variants)


@pytest.mark.cpu
@pytest.mark.ranks
@pytest.mark.parametrize("fault", SILENT.values(), ids=SILENT)
def test_what_megatron_computes_wrongly_is_red(bench: Bench, fault) -> None:  # type: ignore[no-untyped-def]
    outcomes = bench.judge(replace(fault.cell, tags=(fault.id,)))
    red = {rule for rule, outcome in outcomes.items() if outcome.findings}
    assert red == {*fault.also, *(fault.rules if WRONG else ())}


@pytest.mark.cpu
def test_interleaving_gets_more_microbatches_of_the_same_mean() -> None:
    tokens_BS, interleaved = torch.arange(6).reshape(2, 3), cell("qwen3_moe", "pp2-vpp2")
    assert gradients.batch(tokens_BS, cell("qwen3_moe", "pp4")).tolist() == tokens_BS.tolist()
    assert gradients.batch(tokens_BS, interleaved).tolist() == [*tokens_BS.tolist(), *tokens_BS.flip(0).tolist()]
    assert gradients.batch(tokens_BS[:1], interleaved).tolist() == 4 * tokens_BS[:1].tolist()
    assert topology.step_order(2, cell("qwen3_moe", "pp4-vpp2")) == [0, 1, 1, 0, 1, 0, 0, 1]
    pairs = replace(interleaved, batch="pairs")
    assert gradients.batch(tokens_BS, pairs).tolist() == 4 * tokens_BS.tolist()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (Layout(), [[0, 1]]),
        (Layout(tp=2, world=4), [[0], [0], [1], [1]]),
        (Layout(ep=4), [[0], [1], [0], [1]]),
        (Layout(world=3), [[0, 1]] * 3),
    ],
    ids=lambda value: value.text if isinstance(value, Layout) else "",
)
def test_replicas_get_different_rows_of_the_same_mean(layout: Layout, rows: list[list[int]]) -> None:
    tokens_BS = torch.arange(6).reshape(2, 3)
    of = Cell(family="qwen3_moe", layout_name="it", layout=layout)
    found = [gradients.of_replica(tokens_BS, of, rank) for rank in range(layout.world)]
    assert [rows_BS.tolist() for rows_BS in found] == [tokens_BS[picked].tolist() for picked in rows]


@pytest.mark.cpu
@pytest.mark.parametrize(("replicas", "rows"), [(1, [[0, 1, 2, 3]]), (2, [[0, 2], [1, 3]]), (4, [[0, 2], [1, 3]] * 2)])
def test_replicas_get_whole_pairs(replicas: int, rows: list[list[int]]) -> None:
    tokens_BS = torch.arange(4)[:, None]
    of = cell("qwen3_moe", "one", world_size=replicas, batch="pairs")
    found = [gradients.of_replica(tokens_BS, of, rank)[:, 0].tolist() for rank in range(replicas)]
    assert found == rows


@pytest.mark.cpu
def test_a_grid_may_leave_the_training_step_out(tmp_path) -> None:  # type: ignore[no-untyped-def]
    grid = {"backend": ["gloo"], "family": ["qwen3_moe"], "layout": ["one"]}
    data = {"schema": 1, "name": "x", "layouts": {"one": {}}, "grid": [{**grid, "gradients": False}]}
    found = matrix.parse(data, tmp_path / "x.toml")
    assert not found.cells[0].gradients
    assert "GRD-001" not in found.rules[found.cells[0].id]
    assert "FWD-002" in found.rules[found.cells[0].id]
    with pytest.raises(BadInput, match="gradients='no' is not true or false"):
        matrix.parse({**data, "grid": [{**grid, "gradients": "no"}]}, tmp_path / "x.toml")
