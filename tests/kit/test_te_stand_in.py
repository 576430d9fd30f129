"""The stand-in for Transformer Engine: its maths against formulas written out here, and what an import of it finds."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from moeref_conformance.targets.peers import te_modules as te

from tests import warm

pytestmark = pytest.mark.cpu


def filled(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.double().eval()


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("zero", [False, True])
def test_norms(zero: bool) -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    norm = filled(te.RMSNorm(8, eps=1e-3, zero_centered_gamma=zero))
    torch.testing.assert_close(norm(x), rms(x, norm.weight + zero, 1e-3))
    layer = filled(te.LayerNorm(8, eps=1e-3, zero_centered_gamma=zero))
    centred = x - x.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (layer.weight + zero) + layer.bias
    torch.testing.assert_close(layer(x), want)


def test_linears() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    linear = filled(te.Linear(6, 4))
    torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)
    apart = filled(te.Linear(6, 4, return_bias=True))
    y, bias = apart(x)
    torch.testing.assert_close(y, x @ apart.weight.T)
    assert bias is apart.bias
    fused = filled(te.LayerNormLinear(6, 4, eps=1e-3, normalization="RMSNorm", bias=False))
    torch.testing.assert_close(fused(x), rms(x, fused.layer_norm_weight, 1e-3) @ fused.weight.T)
    assert [name for name, _ in fused.named_parameters()] == ["weight", "layer_norm_weight"]


def test_grouped_linear() -> None:
    x = torch.randn(7, 6, dtype=torch.float64)
    grouped = filled(te.GroupedLinear(3, 6, 4))
    want = [
        x[i] @ getattr(grouped, f"weight{e}").T + getattr(grouped, f"bias{e}") for i, e in enumerate([0] * 4 + [2] * 3)
    ]
    torch.testing.assert_close(grouped(x, [4, 0, 3]), torch.stack(want))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_attention(window: tuple[int, int] | None, sinks: bool) -> None:
    length, heads, groups, width, values = 6, 4, 2, 3, 5
    kind = "learnable" if sinks else "vanilla"
    attend = te.DotProductAttention(heads, (width, values), softmax_scale=0.7, window_size=window, softmax_type=kind)
    if sinks:
        torch.nn.init.normal_(attend.softmax_offset)
    q, k = torch.randn(length, 1, heads, width), torch.randn(length, 1, groups, width)
    v = torch.randn(length, 1, groups, values)
    got = attend(q, k, v, attn_mask_type="causal").view(length, heads, values)
    for i in range(length):
        for h in range(heads):
            g = h * groups // heads
            seen = [j for j in range(i + 1) if window is None or i - j <= window[0]]
            scores = [math.exp(0.7 * float(q[i, 0, h] @ k[j, 0, g])) for j in seen]
            total = sum(scores) + (math.exp(float(attend.softmax_offset[h])) if sinks else 0.0)
            want = sum(s / total * v[j, 0, g] for s, j in zip(scores, seen, strict=True))
            torch.testing.assert_close(got[i, h], want, rtol=1e-5, atol=1e-6)


def test_marks_and_shapes_of_shards() -> None:
    column, row = te.Linear(6, 4, tp_size=2, parallel_mode="column"), te.Linear(6, 4, tp_size=2, parallel_mode="row")
    assert (tuple(column.weight.shape), column.weight.partition_dim, column.weight.tensor_model_parallel) == (
        (2, 6),
        0,
        True,
    )
    assert (tuple(row.weight.shape), row.weight.partition_dim, row.weight.tensor_model_parallel) == ((4, 3), 1, True)
    assert te.RMSNorm(4, sequence_parallel=True).weight.sequence_parallel
    assert set(te.Linear(2, 2, bias=False).state_dict()) == {"weight", "_extra_state"}
    with pytest.raises(ValueError, match="5 does not divide over 2"):
        te.Linear(6, 5, tp_size=2, parallel_mode="column")


def run(program: str, folder: Path, forget: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    program = "from moeref_conformance.targets.peers import te\n" + program
    return warm.run(program, cwd=folder, forget=forget)


def test_megatron_takes_it_for_transformer_engine(tmp_path: Path) -> None:
    end = run(
        "te.install(); te.install()\n"
        "import megatron.core.extensions.transformer_engine as e, transformer_engine.pytorch as p\n"
        "assert e.HAVE_TE and issubclass(e.TERowParallelGroupedLinear, p.GroupedLinear)\n"
        "from transformer_engine.pytorch import Float8Tensor",
        tmp_path,
        forget=["megatron"],
    )
    assert "cannot import name 'Float8Tensor'" in end.stderr


def test_it_is_refused_after_megatron(tmp_path: Path) -> None:
    end = run("import megatron.core.extensions.transformer_engine\nte.install()", tmp_path)
    assert "install the stand-in first" in end.stderr
