"""What right targets do on a GPU or in bf16 alone, in the records of a run on a CPU: no rule calls it wrong.

Each comes beside what is wrong there too, and found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.requests.optimizer import RESUMED, STILL, rates
from moeref_conformance.judges import JUDGES, Case
from moeref_conformance.judges.common import placement, records
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.forked import ForkedWorld
from safetensors.torch import load_file, save_file

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture
def ran(variants: Path, tmp_path: Path, shared_world: ForkedWorld) -> Callable[[Cell], Case]:
    """Runs the good target in a cell; the records are the test's to change."""

    def run(one: Cell) -> Case:
        with Shared(shared_world, "moeref", grace=1.0) as world:
            return Bench(world, tmp_path, MoerefTarget(), inputs=variants).case(one)

    return run


def test_a_microbatch_that_runs_again_may_be_summed_in_another_order(ran: Callable[[Cell], Case]) -> None:
    """Interleaved schedules run a microbatch twice. A GPU adds up the outputs of a token's experts in no fixed order.

    So one row of the second run has other last bits.
    """
    case = ran(cell("qwen3_moe", "pp2-vpp2-ep2", layers=4, replay="R3"))
    files = [record.dir / "replay.safetensors" for record in case.observation.ranks]  # type: ignore[union-attr]
    held = [load_file(file) for file in files]
    turned = sum(_with_other_last_bits(held, key) for tensors in held for key in tensors if key.endswith(".1.in"))
    for file, tensors in zip(files, held, strict=True):
        save_file(tensors, file)
    rules = ("RPL-001", "RPL-002", "RPL-003", "RPL-009")
    assert turned > 0
    assert not [finding for rule in rules for finding in JUDGES[rule](case).findings]


def _with_other_last_bits(held: list[dict[str, torch.Tensor]], key: str) -> bool:
    """Give the first row that entered in the call `key`, and the experts that received it, other last bits.

    True if the call before had the same rows; otherwise nothing is changed.
    """
    again = key.replace(".1.in", "")
    for tensors in held:
        first, second = tensors.get(f"{again}.0.in"), tensors.get(f"{again}.1.in")
        if first is None or second is None or not torch.equal(first, second):
            continue
        row_H = first[0].clone()
        for of in held:
            for name in (f"{again}.1.in", f"{again}.1.sent"):
                if name in of:
                    same_T = (of[name] == row_H).all(-1)
                    of[name][same_T] = row_H * (1 + 1e-6)
        return True
    return False


@pytest.mark.parametrize(("seed_of", "red"), [(lambda at: at["pp"] + at["ep"], False), (lambda at: at["ep"], True)])
def test_experts_of_stages_may_begin_from_one_seed_of_megatrons(
    ran: Callable[[Cell], Case], seed_of: Callable[[dict[str, int]], int], red: bool
) -> None:
    """Its formula has 100·pp + 100·ep; with 100·ep alone the stages begin alike."""
    case = ran(cell("qwen3_moe", "pp2-ep2", layers=4))
    for record in records(case, "begun"):
        drawn = seed_of(placement(case).coords(record.rank))
        experts = [row for row in record.value("begun") if ".experts." in row["local"]]
        for number, row in enumerate(experts):
            row["digest"] = f"draw {number} from seed {drawn}"
    on_gpu = replace(case, cell=replace(case.cell, backend="gloo-cuda"), made={})
    found = JUDGES["SED-007"](on_gpu).findings
    assert bool(found) == red
    assert all("begins as decoder.layers.0.mlp.experts" in finding.message for finding in found)


@pytest.mark.parametrize(("layer", "red"), [(1, False), (0, True)])
def test_rounding_may_turn_the_only_telling_gradient_of_a_norm(
    ran: Callable[[Cell], Case], layer: int, red: bool
) -> None:
    """In bf16. The norm of layer 1 has one gradient that tells, that of layer 0 has four: these do not turn all."""
    case = ran(cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True))
    file = records(case, "optimizer")[0].dir / "optimizer.safetensors"
    tensors, name = load_file(file), f"0:decoder.layers.{layer}.self_attention.q_layernorm.weight"
    steps = [step for step in rates(case.cell) if step != STILL]
    still = tensors[f"{STILL}.{name}"].double()
    for step in steps:
        tensors[f"{step}.{name}"] = (2 * still - tensors[f"{step}.{name}"].double()).bfloat16()
    save_file(tensors, file)
    found = JUDGES["OPT-002"](case).findings
    assert [finding.local_name for finding in found] == ([name.partition(":")[2]] if red else [])


@pytest.mark.parametrize(("share", "red"), [(0.05, False), (0.3, True)])
def test_few_elements_step_otherwise_behind_a_restore(ran: Callable[[Cell], Case], share: float, red: bool) -> None:
    """In bf16 on a GPU; on a CPU none does."""
    case = ran(cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True))
    file = records(case, "optimizer_resumed")[0].dir / "optimizer_resumed.safetensors"
    tensors = load_file(file)
    for name in (name for name in tensors if name.startswith(f"{RESUMED}.") and tensors[name].numel() > 500):
        flat = tensors[name].view(-1)
        flat[: int(share * len(flat))] += 0.7 * OPTIMIZER_RATE
    save_file(tensors, file)
    on_gpu = replace(case, cell=replace(case.cell, backend="gloo-cuda"), made={})
    assert bool(JUDGES["OPT-004"](on_gpu).findings) == red
    assert JUDGES["OPT-004"](case).findings


@pytest.mark.parametrize(("experts", "red"), [(1, False), (16, True)])
def test_an_expert_may_have_other_tokens_behind_a_restore(ran: Callable[[Cell], Case], experts: int, red: bool) -> None:
    """In bf16 on a GPU, where routes turn. There one expert stood still behind a restore, and no other did."""
    case = ran(cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True))
    file = records(case, "optimizer_resumed")[0].dir / "optimizer_resumed.safetensors"
    tensors = load_file(file)
    for name in (name for name in tensors if name.startswith(f"{RESUMED}.") and ".layers.1.mlp.experts." in name):
        if int(name.partition("local_experts.")[2].partition(".")[0]) < experts:
            tensors[name] = tensors[name].flip(0)
    save_file(tensors, file)
    on_gpu = replace(case, cell=replace(case.cell, backend="gloo-cuda"), made={})
    found = JUDGES["OPT-004"](on_gpu).findings
    assert [finding.layer for finding in found] == ([1] if red else [])
    assert JUDGES["OPT-004"](case).findings


@pytest.mark.parametrize(("kernels", "red"), [("te", False), ("torch", True)])
def test_fused_attention_may_move_a_generator(ran: Callable[[Cell], Case], kernels: str, red: bool) -> None:
    case = ran(cell("qwen3_moe", "one", layers=2))
    held = [record.value(step) for record in case.observation.ranks for step in ("around_forward", "around_logprobs")]  # type: ignore[union-attr]
    on_gpu = replace(case, cell=replace(case.cell, backend="gloo-cuda", kernels=kernels), made={})
    for row, seen in ((["generator", "Megatron's model-parallel-rng"], red), (["buffer", "expert_bias"], True)):
        for rows in held:
            rows[:] = [row]
        for rule in ("FWD-003", "LGP-005"):
            assert bool(JUDGES[rule](on_gpu).findings) == seen
            assert JUDGES[rule](case).findings


def test_no_step_in_bf16_is_longer_than_the_rate(ran: Callable[[Cell], Case]) -> None:
    case = ran(cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True))
    file = records(case, "optimizer")[0].dir / "optimizer.safetensors"
    tensors, name = load_file(file), "0:decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    *_, last = rates(case.cell)
    assert not JUDGES["OPT-002"](case).findings
    tensors[f"{last}.{name}"][0, 0] += len(rates(case.cell)) * 2 * OPTIMIZER_RATE
    save_file(tensors, file)
    (found,) = JUDGES["OPT-002"](replace(case, made={})).findings
    assert "elements moved further than" in found.message
    assert found.local_name == name.partition(":")[2]
