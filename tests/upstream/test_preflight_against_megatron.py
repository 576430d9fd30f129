"""`moeref check` against megatron-core itself: no run that it refuses works, in a small size of `nox -s preflight`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]


def compared(process: warm.Prepared, cases: int, built: int, before: str = "", shrink: bool = True) -> warm.Done:
    """The run of `preflight_cases` in a fork of `process`, which `before` may spoil."""
    arguments = f"{cases}, {built}, derandomize=True, shrink={shrink}"
    program = f"from tests.upstream import preflight_cases\n{before}\npreflight_cases.main({arguments})"
    return process.run(program, cwd=ROOT)


def test_no_run_that_should_work_is_refused_by_megatron(megatron_on_cpu: warm.Prepared) -> None:
    done = compared(megatron_on_cpu, 60, 2)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "false accepts 0" in done.stdout
    found = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", done.stdout.splitlines()[0])}
    assert (found["runs"], found["built"]) == (60, 2)
    assert min(found["works"], found["refused"]) >= 10


def test_fused_rows_count_as_installed_in_every_version() -> None:
    program = """
from moeref.megatron import construct
model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 2, "add_bias_linear": False}
values = {**model, "moe_permute_fusion": True, "moe_token_dispatcher_type": "alltoall"}
print(construct.construct({"kind": "TransformerConfig", "values": values, "activation": "silu", "dtype": "bfloat16"}))
"""
    done = warm.run(program, cwd=ROOT, path=[str(ROOT)], forget=["megatron", "moeref"])
    assert "'refusal': ''" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("from moeref.config import core_rules\ncore_rules.RULES = ()", "false accept"),
        ("preflight_cases.explained = lambda text: ''", "false refusal without a reason"),
    ],
)
def test_a_missing_rule_or_reason_is_found(before: str, says: str, megatron_on_cpu: warm.Prepared) -> None:
    done = compared(megatron_on_cpu, 150, 0, before, shrink=False)
    assert done.returncode != 0
    assert says in done.stderr
