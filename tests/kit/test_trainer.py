"""moeref's trainer refuses a step that would undo a load, and decays what Megatron's training loop does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit import toy_trainer
from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld, variants: Path) -> Iterator[Bench]:
    with Shared(shared_world, "tests.kit.toy_trainer:never_reloads", grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("trainers"), toy_trainer.never_reloads, inputs=variants)


def test_a_step_from_older_master_weights_is_refused(bench: Bench) -> None:
    outcomes = bench.judge(cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True))
    (found,) = outcomes["RUN-001"].findings
    assert "embedding.word_embeddings.weight is not what its fp32 master weight is" in found.message
    assert "call `reload` after weights are loaded" in found.message


def test_fp32_weights_have_no_masters(bench: Bench) -> None:
    outcomes = bench.judge(cell("qwen3_moe", "one", optimizer_step=True))
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}


def test_norms_do_not_decay(shared_world: ForkedWorld, tmp_path: Path, variants: Path) -> None:
    with Shared(shared_world, "tests.kit.toy_trainer:looks_at_decay", grace=1.0) as world:
        outcomes = Bench(world, tmp_path, toy_trainer.looks_at_decay, inputs=variants).judge(
            cell("qwen3_moe", "one", optimizer_step=True)
        )
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}
    assert outcomes["OPT-006"].met
