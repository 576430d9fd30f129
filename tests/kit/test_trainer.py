"""moeref's trainer refuses a step that would undo a load: its master weights are older."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared
from tests.kit.toy_trainer import target

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld, variants: Path) -> Iterator[Bench]:
    with Shared(shared_world, "tests.kit.toy_trainer:target", grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("trainers"), target, inputs=variants)


def test_a_step_from_older_master_weights_is_refused(bench: Bench) -> None:
    outcomes = bench.judge(cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True))
    (found,) = outcomes["RUN-001"].findings
    assert "embedding.word_embeddings.weight is not what its fp32 master weight is" in found.message
    assert "call `reload` after weights are loaded" in found.message


def test_fp32_weights_have_no_masters(bench: Bench) -> None:
    outcomes = bench.judge(cell("qwen3_moe", "one", optimizer_step=True))
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}
