"""Gradients by transformers' autograd: names, slopes, and what they are under given routes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.selftest.faults.base import cell

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "gpt_oss"])
def test_every_parameter_of_the_checkpoint_has_one(family: str, folder: Path) -> None:
    want = expected(cell(family, "one"), folder)
    gradients = routed.under(want, "native").gradients
    assert {name: g.shape for name, g in gradients.items()} == {name: t.shape for name, t in want.tensors.items()}
    without = {name for name, gradient in gradients.items() if bool(gradient.isnan().any())}
    assert without == {name for name in want.tensors if name.endswith("e_score_correction_bias")}
    zero = {name for name, gradient in gradients.items() if not bool(gradient.any())}
    assert all(".experts." in name for name in zero), "an expert without tokens has none"


def loss(model: torch.nn.Module, want: Expected) -> float:
    with torch.no_grad():
        logits_BSV = model(want.tokens_BS).logits
    labels_BS = want.tokens_BS.roll(-1, 1)
    return float(torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten()))


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.experts.{}.gate_proj", "mlp.gate"])
def test_it_is_the_slope_of_the_loss(part: str, folder: Path) -> None:
    """A step of a thousandth along the gradient changes the loss as it says, in fp64."""
    import transformers

    want = expected(cell("qwen3_moe", "one"), folder)
    native = routed.under(want, "native")
    busy = min(native.experts[1][0, 0])
    name = f"model.layers.1.{part}.weight".format(busy)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        want.dir / "checkpoint",
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    ).eval()
    gradient = native.gradients[name].double()
    gate = model.model.layers[1].mlp.experts.gate_up_proj.data[busy].chunk(2)[0]
    weight = gate if "experts" in part else model.get_parameter(name).data
    step, before = 1e-4 * gradient / gradient.norm(), loss(model, want)
    weight += step
    assert loss(model, want) - before == pytest.approx(float((gradient * step).sum()), rel=2e-2)


def test_a_fused_checkpoint_has_those_of_all_experts_in_one(folder: Path) -> None:
    one, fused = (
        routed.under(expected(cell("glm4_moe", "one", expert_format=form), folder), "native").gradients
        for form in ("per_expert", "fused")
    )
    at = "model.layers.1.mlp.experts."
    down_EHI = torch.stack([one[f"{at}{expert}.down_proj.weight"] for expert in range(16)])
    assert torch.equal(fused[f"{at}down_proj"], down_EHI)


def test_given_routes_have_gradients_of_their_own(folder: Path) -> None:
    want = expected(cell("qwen3_moe", "one", replay="R3"), folder)
    found = {which: routed.under(want, which).gradients["model.layers.0.mlp.gate.weight"] for which in ("native", "a")}
    assert float((found["native"] - found["a"]).norm() / found["a"].norm()) > 0.1


def test_a_token_without_a_route_may_take_other_experts(folder: Path) -> None:
    """They change its logits, and of a last token no other's."""
    want = expected(cell("qwen3_moe", "one", replay="R3"), folder)
    last, native = want.tokens_BS.shape[1] - 1, routed.under(want, "a")
    other = frozenset(sorted({*range(16)} - native.experts[1][0, last])[:3])
    found = routed.under(want, "a", chosen=frozenset({(1, 0, last, other)}))
    assert found.experts[1][0, last] == other
    # An expert's product rounds otherwise with another number of rows, on some CPUs.
    apart = (found.logits_BSV - native.logits_BSV).abs().amax(-1) > 1e-4
    assert apart.nonzero().tolist() == [[0, last]]
    assert routed.under(want, "a") is native


def test_a_loss_of_one_s_own_is_taken_under_the_given_routes(folder: Path) -> None:
    want = expected(cell("glm4_moe", "one", layers=3), folder)
    labels_BS = routed.labels(want)

    def cross_entropy(logits_BSV: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())

    found = routed.of_loss(want, cross_entropy, routed.given_routes(want, "a"))
    for name, gradient in routed.under(want, "a").gradients.items():
        assert torch.equal(found[name].nan_to_num(), gradient.nan_to_num()), name
    own = routed.of_loss(want, cross_entropy)
    assert not torch.equal(own["lm_head.weight"], found["lm_head.weight"])
