"""Axes of a cell: each is one object, and the ids that follow from them do not change."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
from moeref_conformance.contract.axes import axis, read_axes
from moeref_conformance.contract.cells import AXES, DESIGNS, FP8_RECIPES, REPLAY_MODES, Claims
from moeref_conformance.plan.machine import RECIPES
from moeref_conformance.plan.matrix import folder, load

#: By matrix: number of cells, hash of their ids in order, and the hash of the matrix.
FROZEN = {
    "cpu": (739, "57648e665eb7e1d7", "0c67cabd"),
    "gpu": (159, "425d977b5fcf361f", "6d51fe44"),
    "static": (33, "8483eda9e207cf2b", "78086252"),
    "smoke": (10, "e6b43a32b12f81cc", "7a2aaa45"),
    "peers": (59, "852870341ad41f17", "df735fa7"),
    "rollout": (7, "05d31ac12a74b96f", "834a269d"),
}


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_ids_and_hashes_of_the_shipped_matrices_are_frozen(name: str) -> None:
    """A new axis leaves them alone; a change of a matrix file goes here with it."""
    matrix = load(name)
    ids = "\n".join(cell.id for cell in matrix.cells)
    assert (len(matrix.cells), hashlib.sha256(ids.encode()).hexdigest()[:16], matrix.hash) == FROZEN[name]


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({}, None),
        ({"cp": 1}, "cp=2 is over the claimed limit 1"),
        ({"cp": 2, "qwen3_next.cp": 1}, None),
        ({"layers": 2, "glm4_moe.tied": 0}, "layers=4 is over the claimed limit 2"),
        ({"qwen3_moe.cp": 1}, "cp=2 is over the claimed limit 1 of qwen3_moe"),
    ],
)
def test_a_limit_is_of_all_families_or_of_one(limits: dict[str, int], why: str | None) -> None:
    cell = load("cpu").select(["qwen3_moe/cp2/gloo"])[0]
    claims = Claims(facets=frozenset(), families=frozenset({"qwen3_moe"}), backends=frozenset({"gloo"}), limits=limits)
    assert claims.why_not(cell) == why


def test_every_shipped_matrix_is_frozen() -> None:
    assert {path.stem for path in folder().glob("*.toml")} == set(FROZEN)


def test_every_claim_is_of_an_axis_or_of_the_target() -> None:
    claims = [axis.claim for axis in AXES.values() if axis.claim]
    others = {"facets", "adapter_modules", "has_plan", "limits", *DESIGNS}
    assert len(claims) == len(set(claims))
    assert {field.name for field in fields(Claims)} - others == set(claims)


def test_a_design_is_claimed_by_one_of_its_values() -> None:
    defaults = {field.name: field.default for field in fields(Claims)}
    assert {name: choices[0] for name, choices in DESIGNS.items()} == {name: defaults[name] for name in DESIGNS}


def test_choices_are_those_that_the_kit_knows_more_of() -> None:
    assert set(AXES["precision"].choices) - {""} == set(FP8_RECIPES) == set(RECIPES)
    assert AXES["replay"].choices == REPLAY_MODES


@dataclass(frozen=True, kw_only=True)
class Toy:
    shape: str = axis("round", choices=("round", "flat"), claim="shapes", shown="{}-shape")
    wet: bool = axis(False, claim="wet", noun="wet toys", shown="wet")
    parts: int = axis(1, about="a number of parts", claim="parts", noun="parts")
    label: str = ""


def test_a_field_with_metadata_is_an_axis() -> None:
    axes = read_axes(fields(Toy))
    assert [(name, a.field, a.default) for name, a in axes.items()] == [
        ("shape", "shape", "round"),
        ("wet", "wet", False),
        ("parts", "parts", 1),
    ]
    assert [axes[name].text(value) for name, value in (("shape", "flat"), ("wet", True), ("parts", 3))] == [
        "flat-shape",
        "wet",
        "3",
    ]


@pytest.mark.parametrize(
    ("claims", "toy", "reasons"),
    [
        ({"shapes": {"round"}, "wet": False, "parts": 1}, Toy(), ["", "", ""]),
        (
            {"shapes": {"round"}, "wet": False, "parts": 1},
            Toy(shape="flat", wet=True, parts=2),
            ["shape=flat is not claimed (claimed: round)", "wet toys are not claimed", "parts=2 is not claimed"],
        ),
        ({"shapes": {"round", "flat"}, "wet": True, "parts": 2}, Toy(shape="flat", wet=True, parts=2), ["", "", ""]),
    ],
)
def test_a_claim_is_a_set_a_yes_or_a_largest_number(claims: dict[str, object], toy: Toy, reasons: list[str]) -> None:
    found = [a.uncovered(toy, SimpleNamespace(**claims)) for a in read_axes(fields(Toy)).values()]
    assert [text.split(" (at most")[0] for text in found] == reasons


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("shape", 1, "is not a string"),
        ("wet", "yes", "is not true or false"),
        ("parts", True, "is not a number of parts"),
        ("parts", -1, "is not a number of parts"),
        ("parts", 2, ""),
    ],
)
def test_types_of_values(name: str, value: object, problem: str) -> None:
    assert read_axes(fields(Toy))[name].problem(value) == problem
