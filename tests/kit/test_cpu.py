"""Unedited megatron-core on CPU: a real MoE GPTModel gives the same logits under every layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.worlds import cpu
from moeref_conformance.worlds.forked import ForkedWorld
from toy_targets import Toy

from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "ep2": Layout(ep=2),
    "tp2ep2etp1": Layout(tp=2, ep=2, etp=1),
    "ep2etp2": Layout(tp=2, ep=2, etp=2),
}


@pytest.fixture(scope="module", params=["forward", "backward"])
def world(request: pytest.FixtureRequest, shared_world: ForkedWorld) -> ForkedWorld:
    return Shared(shared_world, "toy_targets:target", deadline=60, entry=f"toy_megatron:{request.param}")


def run(world: ForkedWorld, layout: Layout, folder: Path) -> RunOutcome:
    cell = Cell(family="toy", layout_name="x", layout=layout)
    outcome = world.run(cell, folder, {"hf_config": str(folder)}, Toy.claims)
    assert outcome.ok, outcome.error or next(e.text + "\n" + e.stderr_tail for e in outcome.exits if e.first)
    return outcome


def test_layouts(world: ForkedWorld, tmp_path: Path) -> None:
    run(world, Layout(), tmp_path / "one")
    for name, layout in LAYOUTS.items():
        run(world, layout, tmp_path / name)
        if world.entry.endswith(":forward"):
            reference = torch.load(tmp_path / "one" / "rank0000" / "logits.pt")
            found = sorted((tmp_path / name).glob("rank*/logits.pt"))
            assert len(found) == layout.world // layout.pp
            for path in found:
                worst = (torch.load(path) - reference).abs().max().item()
                # Logits reach 4. Sums in another order make 5.6e-6 of that on one CPU, less on another.
                assert worst <= 1e-5, f"{name} {path.parent.name}: {worst}"


def test_nothing_is_installed_for_a_gpu() -> None:
    assert cpu.install("cuda:0", "torch") == ()
    with pytest.raises(ValueError, match="tpu"):
        cpu.install("tpu", "torch")


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        cpu.install("cpu", "torch")


def test_every_entry_has_a_reason() -> None:
    assert len({s.name for s in cpu.SUBSTITUTIONS}) == len(cpu.SUBSTITUTIONS)
    assert all(s.reason and s.install.__doc__ for s in cpu.SUBSTITUTIONS)


def test_an_installed_transformer_engine_lends_no_kernels() -> None:
    """Its optimizers and its product are there, over the stand-in, and megatron-core takes torch's."""
    script = """
import sys
from types import ModuleType
from moeref_conformance.targets.peers import te
from moeref_conformance.worlds import cpu
te.install()
fused = ModuleType("transformer_engine.pytorch.optimizers")
for name in ("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_scale", "multi_tensor_l2norm"):
    setattr(fused, name, print)
sys.modules[fused.__name__] = fused
cpu.install("cpu", "torch")
import torch
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_utils
assert optimizer.Adam is torch.optim.AdamW, optimizer.Adam
assert clip_grads.l2_norm_impl is not print
moe_utils.te_general_gemm = print
cpu.install("cpu", "megatron")
assert moe_utils.te_general_gemm is None
"""
    subprocess.run([sys.executable, "-c", script], check=True)
