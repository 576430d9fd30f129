"""Whatever a target does, the verdict names rank and step, nothing partial is called good, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.misbehaving import MISBEHAVE, target
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import Bench
from tests.kit.shared_world import Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
CELL = cell("qwen3_moe", "pp2", layers=2)

#: tag -> the rules that turn red, and what their findings say.
EXPECTED = {
    "claims-too-much": ({"RUN-001"}, "raised in step forward: Unsupported: no forward pass here"),
    "facet-is-none": ({"RUN-001"}, "claims the facet 'forward' but its session has None"),
    "table-of-none": ({"RUN-001"}, "raised in step names"),
    "table-of-numbers": ({"RUN-001"}, "raised in step names"),
    "empty-table": ({"NAM-001", "NAM-004", "NAM-005"}, "no rank lists lm_head.weight"),
    "logits-of-another-shape": ({"FWD-001", "FWD-002"}, "logits are torch.float32 [3]"),
    "logits-are-a-string": ({"RUN-001"}, "raised in step forward"),
    "no-logits": ({"FWD-001", "FWD-002"}, "logits"),
    "stream-of-strings": ({"RUN-001"}, "raised in step export"),
    "stream-of-arrays": ({"RUN-001"}, "raised in step export"),
    "stream-with-dtypes-of-torch": ({"RUN-001"}, "expected a dtype as text, such as 'float32'"),
    "empty-stream": ({"EXP-001", "EXP-004"}, "no rank was given a tensor"),
    "dies-in-export": ({"RUN-001"}, "died in step export: SIGKILL"),
    "hangs-in-export": ({"RUN-001"}, "hung in step export"),
    "raises-in-export": ({"RUN-001"}, "RuntimeError: the bucket of model.layers.1 is full"),
    "prints": (set(), ""),
    "rewrites-the-checkpoint": ({"RUN-003", "LOD-001", "EXP-002", "FWD-001"}, ".safetensors was "),
    "replaces-a-file": ({"RUN-003"}, "checkpoint/config.json was replaced"),
    "removes-a-file": ({"RUN-003"}, "checkpoint/config.json was removed"),
    "rewrites-the-answers": ({"RUN-003", "LOD-001", "EXP-002", "FWD-001"}, ".safetensors was "),
    "reads-the-answers": ({"FWD-001", "LOD-002", "LOD-004"}, "does not name"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld) -> Iterator[Bench]:
    with Shared(shared_world, "moeref_conformance.selftest.misbehaving:target", grace=1.0) as world:
        yield Bench(world, tmp_path_factory.mktemp("misbehaving"), target)


@pytest.mark.parametrize("tag", MISBEHAVE)
def test_verdict(bench: Bench, tag: str) -> None:
    red, says = EXPECTED[tag]
    outcomes = bench.judge(replace(CELL, tags=(tag,)), deadline=8.0 if tag == "hangs-in-export" else 60.0)
    found = {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings}
    assert red <= set(found)
    if not red:
        assert not found
    texts = [finding.message for findings in found.values() for finding in findings]
    assert any(says in text for text in texts) or not red, texts
    if tag.endswith("-in-export"):
        first = found["RUN-001"][0]
        assert (first.rank, first.coords) == (1, "tp0 pp1 ep0 etp0 dp0")
        # Rank 0 had received 20 whole tensors by then; no rule calls them good.
        assert all(outcomes[rule].untested for rule in outcomes if rule.startswith("EXP"))


def test_the_run_goes_on(bench: Bench) -> None:
    outcomes = bench.judge(CELL)
    assert not [rule for rule, outcome in outcomes.items() if outcome.findings or outcome.untested]
