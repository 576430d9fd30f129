"""The engine's side of a preflight, against tables of what vLLM and SGLang assert, and real deltas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeref import delta
from moeref.check import CheckError, Report, check
from moeref.cli import main
from moeref.costs import CostError, Engine, delta_share, senders
from moeref.layout import Layout

QWEN = "qwen3-30b-a3b"  # 32 heads, 4 KV heads, 128 experts of 768, a vocabulary of 151,936


def judged(engine: str, model: str = QWEN, **more: Any) -> Report:
    return check(model, "tp=2,ep=8,etp=1,world=16", verify=False, engine=engine, **more)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("vllm:tp=3", "32 attention heads do not divide over 3"),
        ("vllm:tp=4", None),
        ("vllm:tp=8", None),  # 4 KV heads, each on 2 ranks
        ("vllm:tp=8,ep=8", None),
        ("vllm:tp=8,ep=4", "all tp·dp = 8 ranks"),
        ("vllm:tp=4,dp=4,ep=16", None),
        ("vllm:tp=4,dp=5", "768 are cut over 20"),
        ("sglang:tp=8,ep=4", None),
        ("sglang:tp=8,ep=3", "ep=3 does not divide tp=8"),
        ("sglang:tp=16,ep=16,dp=4", None),
        ("sglang:tp=6,ep=6,dp=6", "128 experts do not divide over ep=6"),
        ("sglang:tp=8,dp=3", "dp=3 does not divide tp=8"),
    ],
)
def test_what_an_engine_refuses_is_a_problem(engine: str, says: str | None) -> None:
    report = judged(engine)
    if says is None:
        assert report.works, report.problems
        return
    assert report.verdict == "refused"
    assert report.record is None
    assert any(problem.about == "engine" and says in problem.text and problem.fix for problem in report.problems)


def test_what_is_repeated_padded_and_dealt_out_is_told() -> None:
    side = judged("vllm:tp=8,dp=3,ep=24").engine
    assert side is not None
    assert side.facts == ("each of the 4 KV heads is on 2 ranks", "5 experts on a rank, 6 on the first 8")
    assert (side.engine.ranks, side.senders) == (24, 8)
    side = judged("vllm:tp=8", "glm-4.5").engine
    assert side is not None
    assert side.facts == ()


@pytest.mark.parametrize("text", ["trt:tp=8", "vllm:tp", "vllm:tp=0", "vllm:tp=x", "vllm:tp=2,tp=2", "vllm:cp=2"])
def test_an_engine_that_means_nothing_is_bad_input(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckError, match="engine"):
        judged(text)
    assert main(["check", QWEN, "--layout", "world=1", "--engine", text]) == 2
    assert "engine" in capsys.readouterr().err


def test_a_full_sync_is_the_bytes_of_the_published_files() -> None:
    """Two for each of the 30,532,122,624 parameters of Qwen3-30B-A3B."""
    side = judged("vllm:tp=8").engine
    assert side is not None
    assert (side.full_bytes, side.delta_bytes) == (2 * 30_532_122_624, None)


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.05, 0.2, 0.6, 1.0])
def test_a_delta_has_the_bytes_of_a_real_one(density: float) -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(0, 2**15, (1 << 20,), generator=generator, dtype=torch.int16)
    changed = torch.rand(base.shape, generator=generator) < density
    new = torch.where(changed, base + 1, base)
    before, after = (one.view(torch.bfloat16) for one in (base, new))
    sender = delta.Sender(0, [("w", before)])
    made = sum(map(len, sender.delta(1, [("w", after)])))
    assert delta_share(density, 2) * 2 * base.numel() == pytest.approx(made, rel=0.03, abs=2000)


@pytest.mark.parametrize("density", [-0.1, 1.1, float("nan")])
def test_a_density_is_a_share(density: float) -> None:
    with pytest.raises(CostError, match="density"):
        delta_share(density, 2)


def test_senders_hold_each_parameter_once() -> None:
    assert senders(Layout(tp=2, pp=2, ep=4, etp=1, world=16)) == 8
    assert senders(Layout(tp=4, ep=2, etp=1, world=8)) == 4
    assert Engine.parse("sglang:tp=16,dp=4").ranks == 16
