"""Whole cells on a device that is only a label: nothing that a rank runs mixes it with the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_labels import Mixed, labelled
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.shared_world import Shared

ONE = Layout()
#: With the fewest layers that have every kind of a family: dense and MoE, sliding and full, linear and full attention.
CELLS = (
    Cell(family="deepseek_v3", layout_name="one", layout=ONE, layers=3),
    Cell(family="gpt_oss", layout_name="one", layout=ONE, layers=2),
    Cell(family="qwen3_next", layout_name="one", layout=ONE, layers=2),
    Cell(family="glm4_moe", layout_name="one", layout=ONE, layers=2, mtp=1),
    Cell(family="glm4_moe", layout_name="tp2", layout=Layout(tp=2), layers=2, replay="R2"),
    Cell(
        family="qwen3_moe",
        layout_name="tp2-pp2-ep2-etp1",
        layout=Layout(tp=2, pp=2, ep=2, etp=1),
        layers=2,
        replay="R3",
    ),
    Cell(family="deepseek_v3", layout_name="cp2", layout=Layout(cp=2), layers=3),
    Cell(
        family="qwen3_moe",
        layout_name="ep2",
        layout=Layout(ep=2),
        layers=2,
        dispatcher="allgather",
        experts="grouped",
        norms="fused",
        dtype="bfloat16",
    ),
    Cell(family="qwen3_moe", layout_name="one", layout=ONE, layers=2, dtype="bfloat16", optimizer_step=True),
    Cell(family="qwen3_moe", layout_name="tp2", layout=Layout(tp=2), layers=2, loss_mask=True),
    Cell(family="qwen3_moe", layout_name="cp2", layout=Layout(cp=2), layers=2, batch="packed", loss_mask=True),
    Cell(family="glm4_moe", layout_name="tp2", layout=Layout(tp=2), layers=2, batch="packed", bias_update=True),
    Cell(family="deepseek_v3", layout_name="one", layout=ONE, layers=3, mtp=1, loss_mask=True),
)


def run(world: ForkedWorld, cell: Cell, folder: Path, entry: str, variants: Path) -> tuple[RunOutcome, Path]:
    where = folder / "cell"
    where.mkdir()
    labelled = Shared(world, "moeref", deadline=240, entry=f"device_labels:{entry}")
    return labelled.run(cell, where, expected(cell, variants).inputs, MoerefTarget.claims), where


@pytest.mark.ranks
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_no_operator_mixes_host_and_device(
    cell: Cell, tmp_path: Path, variants: Path, shared_world: ForkedWorld
) -> None:
    outcome, where = run(shared_world, cell, tmp_path, "run_rank", variants)
    assert outcome.ok, outcome.error or next(e.text + "\n" + e.stderr_tail for e in outcome.exits if e.first)
    for rank in range(cell.layout.world):
        assert int((where / f"rank{rank:04d}" / "judged.txt").read_text()) > 1000


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("entry", "layout", "operator"),
    [("mask_on_the_host", Layout(cp=2), "aten.where"), ("norms_on_the_host", ONE, "rms_norm")],
)
def test_a_tensor_left_on_the_host_is_found(
    entry: str, layout: Layout, operator: str, tmp_path: Path, variants: Path, shared_world: ForkedWorld
) -> None:
    cell = Cell(family="qwen3_moe", layout_name="some", layout=layout, layers=2, gradients=False)
    outcome, _ = run(shared_world, cell, tmp_path, entry, variants)
    first = next(e for e in outcome.exits if e.first)
    assert first.last_step == "forward", first.stderr_tail
    assert "Mixed" in first.stderr_tail
    assert operator in first.stderr_tail


def test_what_cuda_refuses_is_refused() -> None:
    with labelled():
        scores, mask = torch.rand(3, 3, device="cuda:0"), torch.ones(3, 3, dtype=torch.bool)
        with pytest.raises(Mixed, match="masked_fill"):
            scores.masked_fill(mask, 0.0)
        with pytest.raises(Mixed, match="numpy"):
            scores.numpy()
        with pytest.raises(Mixed, match="mixes host and device"):
            torch.rand(2)[torch.zeros(1, dtype=torch.long, device="cuda")]
        with pytest.raises(Mixed, match="mm"):
            torch.nn.Linear(3, 2)(scores)


def test_what_cuda_takes_is_taken() -> None:
    with labelled() as labels:
        scores = torch.rand(3, 3, device=torch.cuda.current_device(), requires_grad=True)
        assert str(scores.device) == "cuda:0"
        assert scores.new_zeros(2).is_cuda
        assert (scores * torch.tensor(2.0)).is_cuda
        assert scores[torch.tensor([0, 2])].is_cuda
        host = scores.cpu()
        assert not host.is_cuda
        assert not scores.detach().to("cpu").is_cuda
        host.sum().backward()
        assert scores.grad is not None
        assert scores.grad.is_cuda
        assert torch.nn.Linear(3, 2).to("cuda:0")(scores).is_cuda
        assert torch.tensor([1.0], device="cuda").is_cuda
        assert not torch.arange(3).is_cuda
        assert labels.judged > 0
