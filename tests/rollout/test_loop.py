"""Real Megatron and real vLLM agree after every step of training: the loop of docs/examples/grpo_moe.py, in layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from docs.examples import grpo_moe
from docs.examples.grpo_moe import Loop, Size
from moeref.layout import Layout
from moeref.vllm import Sample

#: Rollout against training in fp32: sums in other orders. The largest seen are in docs/status/rollout.md.
CLOSE = 1e-5
CELLS = (
    ("qwen3_moe", "tp=2,pp=2,ep=2,etp=1"),
    ("glm4_moe", "pp=2"),
    ("glm4_moe_lite", "tp=2,ep=2,etp=1"),
    ("deepseek_v3", "ep=2,world=2"),
    ("minimax_m2", "ep=2,world=2"),
)
#: What nox -s rollout-slow adds.
LAYOUTS = ("tp=2", "pp=2", "ep=2,world=2", "tp=2,ep=2,etp=1", "tp=2,pp=2,ep=2,etp=1")
MATRIX = [
    (family, layout)
    for family in ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2")
    for layout in LAYOUTS
    if (family, layout) not in CELLS
]
#: Where R3 is compared with no replay, in bf16.
GAPS = (
    ("qwen3_moe", "tp=2"),
    ("glm4_moe", "pp=2"),
    ("glm4_moe_lite", "ep=2,world=2"),
    ("deepseek_v3", "tp=2,ep=2,etp=1"),
    ("minimax_m2", "pp=2"),
)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(pytest.param(*cell, marks=pytest.mark.engine) for cell in CELLS),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MATRIX),
    ],
)
def test_logprobs_agree_after_each_step(family: str, layout: str, tmp_path: Path) -> None:
    agree(family, layout, tmp_path)


@pytest.mark.gpu
def test_nccl_carries_weights_between_two_processes_of_one_gpu(tmp_path: Path) -> None:
    agree("qwen3_moe", "tp=1", tmp_path, nccl=True)


def agree(family: str, layout: str, tmp_path: Path, *, nccl: bool = False) -> None:
    loop = Loop(Size.tiny(tmp_path, family, Layout.parse(layout)), nccl=nccl)
    if nccl:
        assert loop.place.backend == "nccl"
    try:
        first = loop.rollout()
        before, _ = loop.logprobs(first, True)
        reports = grpo_moe.run(loop, 2)
        after, _ = loop.logprobs(first, True)
    finally:
        loop.close()
    largest = [report.mismatches["R3"].max_abs for report in reports]
    floor = rounding_of_fp32(tmp_path, first)
    print(f"| {family} | {layout} | {' | '.join(f'{one:.1e}' for one in (*largest, floor))} |")
    assert [report.version for report in reports] == [0, 1, 2]
    assert [one <= CLOSE for one in largest] == [True] * 3
    assert reports[0].nbytes == 0
    assert reports[1].nbytes == reports[2].nbytes > 0
    # The steps changed the policy by far more than the tolerance, so that old weights could not have passed.
    moved = np.abs(np.concatenate(after) - np.concatenate(before)).max()
    assert moved > 1000 * CLOSE


def rounding_of_fp32(checkpoint: Path, samples: list[Sample]) -> float:
    """The largest difference of a sampled token's logprob between transformers in fp32 and in float64."""
    from transformers import AutoModelForCausalLM

    def logprobs(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, experts_implementation="eager")
        tokens_PT = torch.from_numpy(np.stack([one.tokens_T for one in samples]))
        with torch.no_grad():
            logprobs_PTV = model(tokens_PT).logits.log_softmax(-1)
        return logprobs_PTV[:, :-1].gather(2, tokens_PT[:, 1:, None])[:, samples[0].prompt - 1 :, 0]

    return float((logprobs(torch.float32) - logprobs(torch.float64)).abs().max())


@pytest.mark.engine
@pytest.mark.parametrize(("family", "layout"), GAPS)
def test_replay_closes_the_gap_in_bf16(family: str, layout: str, tmp_path: Path) -> None:
    loop = Loop(Size.tiny(tmp_path, family, Layout.parse(layout), "bfloat16"), prompts=8, new=24)
    try:
        report, _ = loop.measure(loop.rollout())
    finally:
        loop.close()
    with_R3, without = report.mismatches["R3"], report.mismatches["no replay"]
    both = [f"{of.k3:.1e} | {of.max_abs:.1e}" for of in (without, with_R3)]
    print(f"| {family} | {layout} | {report.agreement:.3f} | {' | '.join(both)} |")
    assert report.agreement < 1
    assert without.k3 >= 5 * with_R3.k3
    assert without.max_abs >= 4 * with_R3.max_abs
