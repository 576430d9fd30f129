"""What `moeref check` refuses for the first step's sake, megatron-core refuses, ignores or computes wrongly there."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeref.config import step_rules
from tests import warm

ROOT = Path(__file__).parents[2]
#: What the outcome of a rule begins with, in turn.
OUTCOMES = {
    "sinkhorn-takes-no-loss": ["AssertionError: Sinkhorn"],
    "sinkhorn-weighs-by-softmax": ["ignored"] * 3,
    "bias-needs-topk": ["ignored"] * 2,
    "quantiles-are-plain": ["AssertionError: Quantile balancing routing"] * 3,
    "groups-hold-the-chosen": ["RuntimeError: selected index k out of range", "others"],
    "groups-need-a-choice": ["ignored"],
    "replay-needs-the-model-s-logits": ["other weights"] * 2,
    "weights-on-inputs-need-one-expert": ["AssertionError: `moe_apply_probs_on_input`"],
    "full-recompute-goes-on": ["TimeoutError: it never ends"],
    "mtp-is-recomputed-alone": ["AssertionError: recompute_num_layers must be 1"],
    "overlap-needs-virtual-stages": ["ValueError: Non-interleaved pipeline parallelism does not support"],
    "overlap-is-unbatched": ["ValueError: Can not use both"],
    "microbatch-groups-fill-the-pipeline": ["ValueError: The number of contiguous micro-batches in a virtual pipeline"],
    "ring-exchange-needs-its-torch": ["AttributeError: module 'torch.distributed' has no attribute 'ring_exchange'"],
    "te-groups-biases-unfused": ["AssertionError: bias_dropout_fusion is not supported"],
    "latent-attention-has-its-scale": ["ignored"],
}
GOOD = {
    "bias": "heeded",
    "groups": "as asked for",
    "scaling": "heeded",
    "replay": "the model's weights",
    "recompute": "runs",
    "quantiles": "runs",
}


@pytest.fixture(scope="module")
def outcomes(megatron_on_cpu: warm.Prepared) -> dict[str, list[str]]:
    """The lines that a program prints of every rule, by its id, and of what is done for comparison."""
    program = """
import logging, warnings
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
from tests.upstream import step_outcomes as step
for name, done in [*step.DONE.items(), *((f"good {name}", [one]) for name, one in step.GOOD.items())]:
    for one in done:
        print(f"{name}: {step.outcome(one)}".splitlines()[0])
"""
    done = megatron_on_cpu.run(program, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, said = line.partition(": ")
        found.setdefault(name, []).append(said)
    return found


@pytest.mark.parametrize("rule", OUTCOMES)
def test_megatron_does_not_do_it(rule: str, outcomes: dict[str, list[str]]) -> None:
    wanted = OUTCOMES[rule]
    assert [said[: len(want)] for said, want in zip(outcomes[rule], wanted, strict=True)] == wanted


@pytest.mark.parametrize("name", GOOD)
def test_megatron_does_what_is_taken(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes[f"good {name}"] == [GOOD[name]]


def test_every_rule_is_tried() -> None:
    assert OUTCOMES.keys() == {rule.id for rule in step_rules.RULES}
