"""The staged backend, made to stage CPU tensors: the same values as plain gloo, call by call and in whole cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.records import Observation
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.plan import matrix
from moeref_conformance.resolve import resolve
from moeref_conformance.worlds.forked import ForkedWorld
from toy_targets import Toy

from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def toy(shared_world: ForkedWorld) -> ForkedWorld:
    return Shared(shared_world, "toy_targets:target", deadline=60, entry="toy_staged:dispatch")


def kept(world: ForkedWorld, folder: Path, entry: str, ranks: int, staged: bool) -> list[dict[str, Any]]:
    cell = Cell(family="toy", layout_name=f"dp{ranks}", layout=Layout(world=ranks), tags=(entry,))
    world.staged = staged
    outcome = world.run(cell, folder, {"hf_config": "."}, Toy.claims)
    assert outcome.ok, outcome.error or [e.stderr_tail[-3000:] for e in outcome.exits if e.first]
    return [torch.load(folder / f"rank{r:04d}" / "kept.pt") for r in range(ranks)]


def same(a: Any, b: Any) -> bool:
    """Equal values, of the same dtype and shape."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


@pytest.fixture(scope="module")
def plain(toy: ForkedWorld, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return kept(toy, tmp_path_factory.mktemp("plain"), "run", 3, staged=False)


def test_every_call_gives_what_gloo_gives(toy: ForkedWorld, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    found = kept(toy, tmp_path, "run", 3, staged=True)
    for there, here in zip(plain, found, strict=True):
        assert set(there) == set(here)
        assert [name for name in there if not same(there[name], here[name])] == []
    refused = {name.split()[0] for name, value in plain[0].items() if isinstance(value, str)}
    assert refused <= {"all_to_all"}, "gloo refuses more than the list form of the all-to-all"


@pytest.mark.parametrize("fault", ["run_forgetful", "run_hasty"])
def test_faulty_staging_is_seen(toy: ForkedWorld, plain: list[dict[str, Any]], tmp_path: Path, fault: str) -> None:
    found = kept(toy, tmp_path, fault, 3, staged=True)
    wrong = {name for name in found[0] if any(not same(t[name], h[name]) for t, h in zip(plain, found, strict=True))}
    calls = {name for name in found[0] if any(not isinstance(t[name], str) for t in plain)}
    assert {name.split()[0] for name in wrong} == {name.split()[0] for name in calls}


def test_beyond_gloo(toy: ForkedWorld, tmp_path: Path) -> None:
    told = kept(toy, tmp_path, "beyond", 2, staged=True)
    for here in told:
        assert here["uneven before"] == [0.0, 0.0]
        assert here["uneven"] == [[[1.0, 1.0]] * 3, [[2.0, 2.0]]]
        assert here["average"] == [1.5, 4.0]
        assert here["float8"] == [[1.5, 1.5], [2.5, 2.5]]
        assert here["gathers coalesced"] == [[1.0, 2.0], [1.0, 1.0, 2.0, 2.0]]
        before, after = here["gathers coalesced on a device"]
        assert before != after == here["gathers coalesced"]
        assert "strides [1, 4] must be contiguous" in here["strided"]
        assert "new_group" in here["split"]
        assert here["backend"] == ["staged", "StagedGroup", "staged"]
    assert [here["average scattered"] for here in told] == [[1.5], [3.5]]
    assert [here["scatters coalesced"] for here in told] == [[[0.0], [0.0, 2.0]], [[2.0], [4.0, 6.0]]]
    assert told[0]["receive before"] == [7.0, 7.0]
    assert told[0]["receive"] == [True, [1.0, 2.0], 0]
    assert told[0]["receive again"] == [0.0, 0.0], "a second wait copied back once more"


@pytest.fixture(scope="module")
def real(shared_world: ForkedWorld) -> ForkedWorld:
    return Shared(shared_world, "moeref", deadline=300)


@pytest.mark.parametrize(
    ("family", "layout", "layers"),  # the fewest that the layout and the family's kinds of layers need
    [
        ("qwen3_moe", "tp2-pp2-vpp2-ep2-etp1", 4),
        ("deepseek_v3", "ep2-etp4", 3),
        ("deepseek_v3", "cp2-pp2-vpp2-ep2", 4),
        ("qwen3_moe", "pp4-vpp2", 8),
    ],
)
def test_whole_cells(real: ForkedWorld, tmp_path: Path, variants: Path, family: str, layout: str, layers: int) -> None:
    asked = family, layout, "gloo"
    found = next(c for c in matrix.load("cpu").cells if (c.family, c.layout_name, c.backend) == asked)
    cell = replace(found, layers=layers, gradients=True)
    inputs, claims = expected(cell, variants).inputs, resolve("moeref").claims
    seen = []
    for staged in (False, True):
        real.staged = staged
        folder = tmp_path / f"staged-{staged}"
        outcome = real.run(cell, folder, dict(inputs), claims)
        assert outcome.ok, outcome.error or [e.text + e.stderr_tail for e in outcome.exits if e.first]
        seen.append(Observation.read(cell, folder, outcome))
    steps = 0
    for there, here in zip(seen[0].ranks, seen[1].ranks, strict=True):
        for file in sorted(there.dir.glob("*.safetensors")):
            step = file.stem
            a, b = there.tensors(step), here.tensors(step)
            assert set(a) == set(b)
            assert [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])] == [], step
            steps += 1
        assert {"shards", "gradients"} <= {file.stem for file in here.dir.glob("*.safetensors")}
    assert any(there.has("forward") and (there.dir / "forward.safetensors").exists() for there in seen[1].ranks)
    assert any((there.dir / "export.safetensors").exists() for there in seen[1].ranks)
    assert steps >= 3 * len(seen[0].ranks)
