"""Adapters of a built model against transformers: two steps by the chain rule, logits and merged weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.worlds.forked import ForkedWorld
from safetensors.torch import load_file, save_file

from tests.kit.shared_world import Shared
from tests.upstream import lora_ranks

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]

SCALE = lora_ranks.ALPHA / lora_ranks.R
Tensors = Mapping[str, torch.Tensor]
CELLS = [
    cell("glm4_moe", "one", layers=2, loss_mask=True),
    cell("qwen3_moe", "tp2-cp2", layers=2, loss_mask=True),
    cell("deepseek_v3", "tp2-ep2-etp1", layers=4, loss_mask=True, norms="fused"),
    cell("glm4_moe", "tp2-ep2-etp1", layers=2, loss_mask=True, experts="grouped"),
    cell("glm4_moe", "pp2-vpp2-ep2", layers=4, loss_mask=True),
    cell("qwen3_moe", "ep2-etp2", layers=2, loss_mask=True),
    cell("qwen3_moe", "tp2-etp1", world_size=4, layers=2, loss_mask=True),
    # Some ranks hold no row of k_proj.
    cell("qwen3_moe", "tp4", layers=2, loss_mask=True, shared_groups=True, tags=("k_proj", "down_proj")),
]


def ran(world: ForkedWorld, one: Cell, folder: Path, where: Path) -> Expected:
    given = expected(one, folder)
    where.mkdir()
    with Shared(
        world, "tests.upstream.lora_ranks:target", deadline=240, entry="tests.upstream.lora_ranks:check"
    ) as shared:
        outcome = shared.run(one, where, given.inputs, lora_ranks.target.claims)
    assert outcome.ok, outcome.error or next(e.text + "\n" + e.stderr_tail for e in outcome.exits if e.first)
    return given


def test_errors_recomputation_and_an_optimizer(shared_world: ForkedWorld, variants: Path, tmp_path: Path) -> None:
    ran(shared_world, replace(cell("glm4_moe", "one", layers=2), tags=("errors",)), variants, tmp_path / "one")


@pytest.mark.parametrize("one", CELLS, ids=lambda one: one.id)
def test_two_steps_are_transformers(one: Cell, shared_world: ForkedWorld, variants: Path, tmp_path: Path) -> None:
    given = ran(shared_world, one, variants, tmp_path / "run")
    alone = replace(one, layout_name="one", layout=Layout(), tags=("read",))
    ran(shared_world, alone, variants, tmp_path / "alone")
    saved = {file.stem: load_file(file) for file in sorted(tmp_path.rglob("*.safetensors"))}
    fresh, trained = saved["fresh"], saved["step2"]
    assert not any(tensor.any() for name, tensor in fresh.items() if "lora_B" in name)
    assert {tensor.dtype for tensor in fresh.values()} == {torch.float32}
    for before, after in (("fresh", "step1"), ("step1", "step2")):
        for name, gradient in chained(given, saved[before], tmp_path / before).items():
            torch.testing.assert_close(saved[after][name], saved[before][name] - lora_ranks.RATE * gradient, msg=name)
    weights = merged(given.tensors, trained)
    assert saved["merged"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved["merged"][name], weight, msg=name)
    logits = {name: saved[f"logits-{name}"]["logits"] for name in ("fresh", "trained", "base", "after")}
    wanted_BSV = logits_of(given, weights, tmp_path / "trained")
    torch.testing.assert_close(logits["trained"], wanted_BSV, rtol=1e-4, atol=1e-4)
    assert (wanted_BSV - given.logits_BSV).norm() > 1e-2 * given.logits_BSV.norm()
    assert torch.equal(logits["fresh"], logits["base"])
    assert torch.equal(logits["trained"], logits["after"])
    for kept in ("again", "read"):
        assert all(torch.equal(tensor, saved[kept][name]) for name, tensor in trained.items())


def base_of(name: str) -> str:
    """The weight of an adapter's matrix."""
    module = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")[0]
    return f"{module}.weight"


def merged(weights: Tensors, adapters: Tensors) -> dict[str, torch.Tensor]:
    found = dict(weights)
    for name, a in adapters.items():
        if "lora_A" in name:
            found[base_of(name)] = weights[base_of(name)] + SCALE * adapters[name.replace("lora_A", "lora_B")] @ a
    return found


def of(given: Expected, weights: Tensors, folder: Path) -> Expected:
    """The same model with other weights."""
    folder.mkdir(exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        if (source := Path(given.inputs["checkpoint"], file)).exists():
            (folder / file).write_bytes(source.read_bytes())
    return replace(given, inputs={**given.inputs, "checkpoint": str(folder)})


def chained(given: Expected, adapters: Tensors, folder: Path) -> dict[str, torch.Tensor]:
    """The gradients of all matrices, from those of merged weights."""
    labels_BS = routed.labels(given)

    def loss(logits_BSV: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())

    gradients = routed.of_loss(of(given, merged(given.tensors, adapters), folder), loss)
    found = {}
    for name, a in adapters.items():
        if "lora_A" in name:
            b_name, whole = name.replace("lora_A", "lora_B"), gradients[base_of(name)]
            found[name], found[b_name] = SCALE * adapters[b_name].T @ whole, SCALE * whole @ a.T
    return found


def logits_of(given: Expected, weights: Tensors, folder: Path) -> torch.Tensor:
    found = []

    def kept(logits_BSV: torch.Tensor) -> torch.Tensor:
        found.append(logits_BSV.detach())
        return logits_BSV.sum()

    routed.of_loss(of(given, weights, folder), kept)
    return found[0]
