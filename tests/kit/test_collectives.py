"""Checked collectives: right calls give right values, wrong ones are refused on every rank by what each declared."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.worlds.collective_specs import ALIASES, FORMS, Spec
from moeref_conformance.worlds.collectives import _poison
from moeref_conformance.worlds.forked import ForkedWorld
from toy_targets import Toy

from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cell")
    cell = Cell(family="toy", layout_name="dp2", layout=Layout(world=2))
    with Shared(shared_world, "toy_targets:target", deadline=30, entry="toy_collectives:run") as world:
        outcome = world.run(cell, folder, {"hf_config": "."}, Toy.claims)
    assert outcome.ok, outcome.error or [e.stderr_tail for e in outcome.exits]
    return [json.loads((folder / f"rank{r:04d}" / "told.json").read_text()) for r in (0, 1)]


@pytest.mark.parametrize(
    ("case", "on_0", "on_1"),
    [
        ("all_reduce", [3.0] * 6, [3.0] * 6),
        ("reduce", None, 3.0),
        ("broadcast", [2, 1], [2, 1]),
        ("broadcast_flat", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        ("all_gather", [[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]),
        ("all_gather_uneven", [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 2.0]),
        ("all_gather_in_place", [1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]),
        ("all_gather_base", [[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]),
        ("reduce_scatter", [2.0, 2.0], [10.0, 10.0]),
        ("reduce_scatter_uneven", [2.0, 2.0, 2.0], [10.0]),
        ("reduce_scatter_in_place", [0.0, 2.0], [4.0, 6.0]),
        ("all_to_all_even", [0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]),
        ("all_to_all_uneven", [1.0], [1.0, 1.0, 1.0, 2.0, 2.0]),
        ("scatter", [1.0, 1.0], [2.0, 2.0]),
        ("gather", [[0.0, 0.0], [1.0, 1.0]], None),
        ("objects", [[0, 1], [["root", 1]]], [[0, 1], [["root", 1]]]),
        ("subgroup", 2.0, 2.0),
        ("batched_p2p", [2.0, 2.0], [1.0, 1.0]),
        ("receive_buffer_is_poisoned", [None, [0.0, 0.0]], [True, [1.0, 1.0]]),
    ],
)
def test_right_calls(told: list[dict[str, Any]], case: str, on_0: Any, on_1: Any) -> None:
    assert told[0][case] == on_0
    assert told[1][case] == on_1


def test_async_calls_return_the_work(told: list[dict[str, Any]]) -> None:
    assert [t["all_reduce_async"][1] for t in told] == [[2, 2, 2, 2]] * 2
    assert "Work" in told[0]["all_reduce_async"][0]


@pytest.mark.parametrize(
    ("case", "on_0", "on_1"),
    [
        (
            "wrong_op",
            "op differs: rank 0 has all_gather_into_tensor, rank 1 has all_reduce",
            "op differs: rank 0 has all_gather",
        ),
        ("wrong_barrier", "op differs: rank 0 has all_reduce, rank 1 has barrier", "op differs"),
        ("wrong_dtype", "dtype differs: rank 0 has float32, rank 1 has bfloat16", "dtype differs"),
        ("wrong_shape", "shape differs: rank 0 has [2, 3], rank 1 has [3, 3]", "in float32[3, 3]"),
        ("wrong_flat", "peers send [6, 0] elements, rank 1 expects [5, 0]", "I expect [5, 0]"),
        ("wrong_reduction", "reduction differs: rank 0 has SUM, rank 1 has MAX", "reduction differs"),
        ("wrong_root", "root differs: rank 0 has 0, rank 1 has 1", "root differs"),
        ("wrong_splits", "peers send [3, 0] rows, rank 1 expects [1, 0]", "peers send [3, 0] rows, I expect [1, 0]"),
        ("wrong_sum", "rank 0 passes splits or pieces that do not add up", "rank 0 passes splits or pieces"),
        ("wrong_row", "shape differs: rank 0 has [3], rank 1 has [4]", "shape differs"),
        ("wrong_piece", "peers send [2, 3] elements, I expect [2, 2]", "peers send [2, 3] elements, I expect [2, 2]"),
        ("wrong_scatter", "peers send [3, 0] elements, rank 1 expects [2, 0]", "I expect [2, 0]"),
        ("not_contiguous", "tensor is not contiguous on rank 0", "tensor is not contiguous on rank 0"),
    ],
)
def test_wrong_calls_are_refused_on_both_ranks(told: list[dict[str, Any]], case: str, on_0: str, on_1: str) -> None:
    assert on_0 in str(told[0][case])
    assert on_1 in str(told[1][case])
    assert "in group [0, 1], rank 0: " in told[0][case]
    assert "in group [0, 1], rank 1: " in told[1][case]


def test_every_case_was_judged(told: list[dict[str, Any]]) -> None:
    import toy_collectives

    assert set(told[0]) == set(toy_collectives.CASES)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_poison(dtype: torch.dtype) -> None:
    out = torch.zeros(3, dtype=dtype)
    _poison(Spec(dtype, outputs=[out]))
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(out.isnan().all())
    else:
        assert out.tolist() == [True if dtype == torch.bool else torch.iinfo(dtype).max] * 3


def test_poison_spares_inputs_that_share_memory() -> None:
    whole = torch.arange(4.0)
    _poison(Spec(whole.dtype, inputs=[whole[2:]], outputs=[whole]))
    assert whole[2:].tolist() == [2.0, 3.0]
    assert bool(whole[:2].isnan().all())


def test_aliases_are_calls() -> None:
    assert set(ALIASES.values()) < set(FORMS)
    assert not set(ALIASES) & set(FORMS)
