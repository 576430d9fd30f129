"""Experts of one layer, computed one after the other and in one grouped GEMM, on the same rows and weights.

megatron-core's SequentialMLP against torch's grouped_mm and, where Transformer Engine is installed, TEGroupedMLP. The
judge of all is a loop in fp64. (GroupedMLP, on the package grouped_gemm, is in megatron-core 0.16 but not in 0.19.)
Experts get unequal numbers of rows, some none. Backward is measured with groups in multiples of 8: in the weights'
gradient rows are the contraction, whose groups torch wants to begin at 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu import models
from tests.bench.gpu.figures import Figure, close, ratio, timed

#: Relative distance from fp64. bf16 operands are rounded at 2^-9, sums once more between the two GEMMs.
MOST = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
GROUPED_MM: Callable[..., torch.Tensor] = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """Distances from fp64 and times of each way, forward and with backward."""
    model = sizes.model(layers=1, vocab_size=128)
    sequential = _experts(models.made(model, device))
    ways: dict[str, Callable[..., torch.Tensor]] = {"SequentialMLP": partial(_module, sequential)}
    w1_EIH, w2_EHF = (_stacked(sequential, name) for name in ("linear_fc1", "linear_fc2"))
    if spoil:
        with torch.no_grad():
            w2_EHF[1] *= -1
    ways["torch grouped_mm"] = partial(_grouped, w1_EIH, w2_EHF)
    held = {"SequentialMLP": list(sequential.parameters()), "torch grouped_mm": [w1_EIH, w2_EHF]}
    if _engine():
        te = _experts(models.made(model, device, kernels="te", norms="fused", experts="grouped"))
        with torch.no_grad():
            for i, expert in enumerate(sequential.local_experts):
                for name in ("linear_fc1", "linear_fc2"):
                    getattr(getattr(te, name), f"weight{i}").copy_(getattr(expert, name).weight)
        ways["TEGroupedMLP"], held["TEGroupedMLP"] = partial(_module, te), list(te.parameters())
    found = []
    for what, multiple in (("forward", 1), ("forward and backward", 8)):
        counts_E = unequal(sizes.tokens * model.top_k, model.experts, multiple)
        rows_RH, probs_R, grad_RH = _rows(int(counts_E.sum()), model.hidden, device, w1_EIH.dtype)
        given = rows_RH, counts_E, probs_R
        expected_RH = reference(sequential, *given)
        if multiple == 1:
            against = "fp64, one expert after the other"
            most = MOST[w1_EIH.dtype]
            found += [close(f"{name}, {what}", way(*given), expected_RH, most, against) for name, way in ways.items()]
            calls: list[Callable[[], Any]] = [partial(_forward, way, given) for way in ways.values()]
        else:
            calls = [partial(_backward, way, given, grad_RH, held[name]) for name, way in ways.items()]
            found += _gradients(sequential, calls, w1_EIH)
        first, *others = timed(device, *calls, rounds=sizes.rounds)
        names = list(ways)[1:]
        found += [ratio(f"{n}, {what}", t, first, "SequentialMLP") for n, t in zip(names, others, strict=True)]
    found.append(Figure("experts without rows", float((counts_E == 0).sum()), f"of {model.experts}"))
    return found


def unequal(rows: int, experts: int, multiple: int) -> torch.Tensor:
    """int64 [E] on the host: most rows for few experts, every eighth expert none; groups in multiples of `multiple`."""
    generator = torch.Generator().manual_seed(0)
    weights_E = 1.0 / (1 + torch.randperm(experts, generator=generator))
    weights_E[::8] = 0
    drawn_R = torch.multinomial(weights_E, rows, replacement=True, generator=generator)
    return (torch.bincount(drawn_R, minlength=experts) + multiple - 1) // multiple * multiple


def reference(sequential: Any, rows_RH: torch.Tensor, counts_E: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
    """SwiGLU of each expert's rows in fp64, times the row's weight."""
    outputs = []
    begin = 0
    with torch.no_grad():
        for expert, count in zip(sequential.local_experts, counts_E.tolist(), strict=True):
            mine = rows_RH[begin : begin + count].double()
            gate, up = (mine @ expert.linear_fc1.weight.double().T).chunk(2, dim=-1)
            inner = gate / (1 + (-gate).exp()) * up * probs_R[begin : begin + count, None].double()
            outputs.append(inner @ expert.linear_fc2.weight.double().T)
            begin += count
    return torch.cat(outputs)


def _grouped(
    w1_EIH: torch.Tensor, w2_EHF: torch.Tensor, rows_RH: torch.Tensor, counts_E: torch.Tensor, probs_R: torch.Tensor
) -> torch.Tensor:
    ends_E = counts_E.cumsum(0).to(rows_RH.device, torch.int32)
    gate, up = GROUPED_MM(rows_RH, w1_EIH.mT, offs=ends_E).chunk(2, dim=-1)
    inner_RF = (torch.nn.functional.silu(gate) * up * probs_R[:, None]).to(rows_RH.dtype)
    return GROUPED_MM(inner_RF, w2_EHF.mT, offs=ends_E)


def _module(experts: Any, rows_RH: torch.Tensor, counts_E: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
    output_RH: torch.Tensor = experts(rows_RH, counts_E, probs_R)[0]
    return output_RH


def _forward(way: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad():
        return way(*given)


def _backward(
    way: Callable[..., torch.Tensor],
    given: tuple[torch.Tensor, ...],
    grad_RH: torch.Tensor,
    held: list[torch.Tensor],
) -> None:
    for parameter in held:
        parameter.grad = None
    way(*given).backward(grad_RH)  # type: ignore[no-untyped-call]


def _gradients(sequential: Any, calls: list[Callable[[], Any]], w1_EIH: torch.Tensor) -> list[Figure]:
    """The first weights' gradient of grouped_mm against SequentialMLP's; both are rounded, each from its own sums."""
    for call in calls[:2]:
        call()
    assert w1_EIH.grad is not None
    grads = [expert.linear_fc1.weight.grad for expert in sequential.local_experts]
    expected = torch.stack([torch.zeros_like(w1_EIH[0]) if grad is None else grad for grad in grads])
    most = 2 * MOST[w1_EIH.dtype]
    return [close("torch grouped_mm, gradient of the first weights", w1_EIH.grad, expected, most, "SequentialMLP")]


def _rows(count: int, hidden: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(1)
    rows_RH, grad_RH = (torch.randn(count, hidden, generator=generator, device=device).to(dtype) for _ in range(2))
    return rows_RH, torch.rand(count, generator=generator, device=device), grad_RH


def _experts(built: Any) -> Any:
    return built.chunks[0].decoder.layers[0].mlp.experts


def _stacked(sequential: Any, name: str) -> torch.Tensor:
    weights = [getattr(expert, name).weight.detach() for expert in sequential.local_experts]
    return torch.stack(weights).requires_grad_()


def _engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)
