"""Changes of moeref: cells judge them, and a cell that is red by itself is no judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from moeref_conformance.worlds.forked import ForkedWorld

from moeref.megatron import lora
from tests.kit import mutate_target
from tests.kit.mutate import Mutant, mutants
from tests.kit.shared_world import Shared

CELL = "qwen3_moe+loss-mask/one/gloo"


@pytest.fixture(scope="module")
def cells(shared_world: ForkedWorld, variants: Path) -> Iterator[mutate_target.Cells]:
    with Shared(shared_world, "moeref", grace=1.0, entry="tests.kit.mutate_target:run") as world:
        held = mutate_target.Cells(world, variants)
        held.look([cell for cell in mutate_target.MATRIX.cells if cell.id == CELL], [lora.__name__])
        yield held


def _mutant(text: str) -> Mutant:
    return next(mutant for mutant in mutants(lora) if mutant.text.startswith(text))


@pytest.mark.ranks
def test_a_change_is_noticed_in_a_cell_that_reaches_it(cells: mutate_target.Cells) -> None:
    mutant = _mutant("self.weight + self._lora.scale")
    assert [cell.id for cell in cells.reaching(mutant)] == [CELL]
    noticed = cells.notices(mutant)
    assert noticed is not None
    assert noticed[0] == CELL
    assert noticed[1][0].startswith("LRA-")


@pytest.mark.ranks
def test_a_change_that_makes_no_difference_is_left(cells: mutate_target.Cells) -> None:
    assert cells.notices(_mutant("sharding == 'row' → sharding != 'row'")) is None


def test_all_cells_that_are_asked_by_default_are_in_the_matrix() -> None:
    assert set(mutate_target.CELLS) <= {cell.id for cell in mutate_target.MATRIX.cells}


def test_a_change_that_nothing_takes_is_left_out() -> None:
    mutant = _mutant("self.weight + self._lora.scale")
    assert mutate_target.can_be_applied(mutant)
    assert not mutate_target.can_be_applied(replace(mutant, module=__name__, function="_gone", node=0))


def _gone() -> int:
    return 1 + 1


del _gone
