"""No MUST calls a correct but different target wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moeref_conformance.contract.cells import DESIGNS
from moeref_conformance.judges import JUDGES
from moeref_conformance.selftest.benign import BENIGN, Benign, targets
from moeref_conformance.selftest.faults import FAULTS
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.faults.context import zigzag
from moeref_conformance.targets.moeref import MoerefTarget, unpadded
from moeref_conformance.worlds.forked import ForkedWorld
from safetensors.torch import load_file, save_file

from tests.kit.bench import NATIVE, RULES, Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
SHOULD = {rule.id for rule in RULES.values() if rule.level == "SHOULD"}
#: Faults that break nothing but recommendations; `test_faults` asserts what each turns red.
OF_TASTE = {fault.id for fault in FAULTS.values() if {*fault.rules, *fault.also} <= SHOULD}


#: Designs that the good target cannot be given at its border, and are judged on records: here, and in `test_judges`.
OF_RECORDS = {"cp_cut", "order"}
#: What engines do, in `nox -s sync`: moeref's gives routes, those of docs/examples/vllm_reload.py gives none.
OF_ENGINES = {"engine_logprobs", "engine_routes"}


@pytest.mark.parametrize("design", BENIGN.values(), ids=BENIGN)
def test_no_must_calls_it_wrong(design: Benign, variants: Path, tmp_path: Path, shared_world: ForkedWorld) -> None:
    with Shared(shared_world, f"benign:{design.id}", grace=1.0) as world:
        bench = Bench(world, tmp_path, targets[design.id], inputs=variants)
        outcomes = bench.judge(design.cell, one_rank=design.one_rank, deadline=design.deadline)
    red = {rule: [f.message for f in outcome.findings] for rule, outcome in outcomes.items() if outcome.findings}
    assert {rule: said for rule, said in red.items() if rule not in SHOULD} == {}
    assert set(red) == set(design.should), red
    untested = {rule for rule, outcome in outcomes.items() if outcome.untested}
    required = {rule for rule in untested if set(RULES[rule].requires) & set(red)}
    native = NATIVE if design.cell.dtype == "bfloat16" else set()
    of_policies = {"GRD-004", "GRD-005", *(f"LRA-00{number}" for number in range(1, 8))} if design.cell.mtp else set()
    sends_none = {rule for rule in RULES if rule.startswith("QNT-") and not design.claims.get("sends_int4", True)}
    assert untested - required <= {"GRD-001", *of_policies, *native, *sends_none}, {
        rule: outcomes[rule].untested for rule in untested
    }


def test_cp_may_cut_in_runs(variants: Path, tmp_path: Path, shared_world: ForkedWorld) -> None:
    """On the records of the good target: what the MoE layers of both CP ranks saw is joined, and cut in runs."""
    one = cell("qwen3_moe", "cp2", replay="R3")
    with Shared(shared_world, "moeref", grace=1.0) as world:
        bench = Bench(world, tmp_path, MoerefTarget(), inputs=variants)
        case = bench.case(one)
    files = [record.dir / "replay.safetensors" for record in case.observation.ranks]  # type: ignore[union-attr]
    held = [load_file(file) for file in files]
    for key in (key for key in held[0] if key.endswith(".in")):
        whole_SH = torch.empty_like(torch.cat([tensors[key] for tensors in held]))
        whole_SH[zigzag(len(whole_SH), 2)] = torch.cat([tensors[key] for tensors in held])
        for tensors, run_SH in zip(held, whole_SH.chunk(2), strict=True):
            tensors[key] = run_SH.clone()
    for file, tensors in zip(files, held, strict=True):
        save_file(tensors, file)
    rules = ("RPL-001", "RPL-002", "RPL-003", "RPL-009")
    for cut, red in (("zigzag", {"RPL-001", "RPL-002", "RPL-003", "RPL-009"}), ("runs", set[str]())):
        case = replace(case, claims=replace(case.claims, cp_cut=cut), made={})
        assert {rule for rule in rules if JUDGES[rule](case).findings} == red


def test_a_vocabulary_may_be_padded_by_tp_alone(variants: Path, tmp_path: Path, shared_world: ForkedWorld) -> None:
    """131 rows become 132: an odd number, and none of the multiples of 128 that the good target has elsewhere."""
    with Shared(shared_world, "moeref_conformance.targets.moeref:unpadded", grace=1.0) as world:
        outcomes = Bench(world, tmp_path, unpadded(), inputs=variants).judge(cell("qwen3_moe", "tp2"))
    assert {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings} == {}


def test_only_recommendations_are_not_followed() -> None:
    assert {rule for design in BENIGN.values() for rule in design.should} <= SHOULD


def test_every_design_that_can_be_claimed_is_there() -> None:
    own = MoerefTarget.claims
    other = {n: {*of} - {getattr(own, n)} for n, of in DESIGNS.items() if n not in OF_RECORDS | OF_ENGINES}
    claimed = {name: {d.claims[name] for d in BENIGN.values() if name in d.claims} for name in other}
    assert claimed == other


def test_they_are_many() -> None:
    assert len(BENIGN) >= 25
    assert len(BENIGN) + len(OF_TASTE) + len(OF_RECORDS) >= 45
