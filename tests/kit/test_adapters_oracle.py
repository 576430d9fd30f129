"""Adapters by their definition: which linears have one, gradients of both factors, what is one, and what is merged."""

from __future__ import annotations

import pytest
import torch
from moeref_conformance.contract.cells import ADAPTER_MODULES
from moeref_conformance.contract.requests.adapters import RANK, SCALE
from moeref_conformance.oracles import adapters, expert_tensors, routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu
Q, K = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected(cell("glm4_moe", "one", loss_mask=True), tmp_path_factory.mktemp("adapters"))


def drawn(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_linears_of_layers_have_adapters_and_nothing_else_has(want: Expected) -> None:
    names = adapters.adapted(want.tensors, ADAPTER_MODULES)
    without = {name.removeprefix("model.layers.") for name in want.tensors.keys() - set(names)}
    assert {name.split(".", 1)[1] for name in without if name[0].isdigit()} == {
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
        *(f"self_attn.{name}" for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
        *(name for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if f"0.{name}" in without),
        *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    }
    assert any("shared_experts" in name for name in names)
    assert adapters.adapted(want.tensors, ["q_proj"]) == [name for name in names if ".q_proj." in name]


def test_gradients_are_those_of_autograd() -> None:
    tensors = {Q: torch.randn(12, 20, generator=torch.Generator().manual_seed(1))}
    factors = drawn(adapters.shapes(tensors, [Q]))
    a, b = (factors[adapters.peft(Q, factor)].double().requires_grad_() for factor in adapters.FACTORS)
    weight = tensors[Q].double() + SCALE * b @ a
    weight.retain_grad()
    weight.sin().sum().backward()
    assert weight.grad is not None
    found = adapters.gradients({Q: weight.grad}, factors, [Q])
    for factor, parameter in zip(adapters.FACTORS, (a, b), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(found[adapters.peft(Q, factor)], parameter.grad)


def test_merged_weights_are_within_the_rounding_of_any_order() -> None:
    tensors = {Q: torch.randn(12, 20, generator=torch.Generator().manual_seed(1))}
    factors = drawn(adapters.shapes(tensors, [Q]))
    a, b = (factors[adapters.peft(Q, factor)] for factor in adapters.FACTORS)
    made, limit = adapters.merged(tensors, factors, [Q])[Q], adapters.rounding(tensors, factors, Q)
    for other in (tensors[Q] + SCALE * (b @ a), tensors[Q] + b @ (SCALE * a), tensors[Q] + (SCALE * b) @ a):
        assert bool(((other - made).abs() <= limit).all())
    assert not bool(((made.bfloat16().float() - made).abs() <= limit).all())
    assert adapters.shapes(tensors, [Q])[adapters.peft(Q, "lora_A")] == [RANK, 20]


def test_factors_that_hold_the_same_in_all_streams_are_one() -> None:
    a_of_q, a_of_k = adapters.peft(Q, "lora_A"), adapters.peft(K, "lora_A")
    same = {a_of_q: torch.ones(4, 8), a_of_k: torch.ones(4, 8)}
    parted = {a_of_q: torch.ones(4, 8), a_of_k: torch.zeros(4, 8)}
    assert adapters.sharing([same, same]) == [[a_of_k, a_of_q]]
    assert adapters.sharing([same, parted]) == [[a_of_k], [a_of_q]]
    elsewhere = {a_of_q: torch.ones(4, 8), a_of_q.replace("layers.0", "layers.1"): torch.ones(4, 8)}
    assert len(adapters.sharing([elsewhere])) == 2
    alike = {adapters.peft(Q, factor): torch.ones(RANK, RANK) for factor in adapters.FACTORS}
    assert len(adapters.sharing([alike])) == 2


def test_a_checkpoint_of_its_own_weights_computes_the_same(want: Expected) -> None:
    native, again = routed.under(want, "native"), routed.of_weights(want, want.tensors)
    assert torch.equal(again.logits_BSV, native.logits_BSV)
    assert all(torch.equal(again.gradients[n].nan_to_num(), g.nan_to_num()) for n, g in native.gradients.items())


def test_experts_are_taken_apart_as_other_files_hold_them(
    want: Expected, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fused = expected(
        cell("glm4_moe", "one", expert_format="fused", loss_mask=True), tmp_path_factory.mktemp("fused")
    ).tensors
    apart = expert_tensors.split(fused)
    assert apart.keys() == want.tensors.keys() != fused.keys()
    assert all(torch.equal(of, want.tensors[name]) for name, of in apart.items())
    again = expert_tensors.joined(apart, fused)
    assert again.keys() == fused.keys()
    assert all(torch.equal(of, fused[name]) for name, of in again.items())
