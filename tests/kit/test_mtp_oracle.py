"""Gradients of multi-token prediction layers: names, the decoder's own part, and the slope of the layers' loss."""

from __future__ import annotations

import pytest
import torch
from moeref_conformance.oracles import mtp, routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.selftest.faults.base import cell
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected(cell("glm4_moe", "one", mtp=1), tmp_path_factory.mktemp("mtp"))


def test_every_parameter_has_one_and_copies_have_that_of_both_uses(want: Expected) -> None:
    found = mtp.gradients(want)
    assert {name: g.shape for name, g in found.items()} == {name: t.shape for name, t in want.tensors.items()}
    without = {name for name, gradient in found.items() if bool(gradient.isnan().any())}
    assert without == {name for name in want.tensors if name.endswith("e_score_correction_bias")}
    assert torch.equal(found["model.layers.2.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["lm_head.weight"])


@pytest.mark.parametrize("which", ["native", "a"])
def test_without_their_factor_the_decoder_has_its_own(
    want: Expected, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "FACTOR", 0.0)
    routes = () if which == "native" else routed.given_routes(want, which)
    alone, decoder = mtp._gradients(want, routes), routed.under(want, which).gradients
    for name, gradient in alone.items():
        if ".layers.2." in name:
            assert name.endswith(("embed_tokens.weight", "head.weight", "correction_bias")) or not gradient.any()
        elif not name.endswith("correction_bias"):
            assert torch.allclose(gradient, decoder[name], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("part", ["eh_proj", "enorm", "hnorm", "shared_head.norm"])
def test_it_is_the_slope_of_the_loss(want: Expected, part: str) -> None:
    name = f"model.layers.2.{part}.weight"
    names = [f"model.layers.2.{one}.weight" for one in mtp.AROUND]
    gradient = mtp.gradients(want)[name]
    step = 2e-3 * gradient / gradient.norm()

    def loss(sign: float) -> float:
        around = {one: want.tensors[one] + (sign * step if one == name else 0.0) for one in names}
        with torch.no_grad():
            return float(mtp._loss(mtp._model(want, 3), 2, around, want.tokens_BS).detach())

    assert loss(1) - loss(-1) == pytest.approx(2 * float((gradient * step).sum()), rel=0.05)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next"]
)
def test_transformers_builds_no_such_layer(family: str) -> None:
    """Once it does, its autograd is the better oracle."""
    config = AutoConfig.for_model(family, num_hidden_layers=4, num_nextn_predict_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_modules()]
    assert not [name for name in names if "mtp" in name or "nextn" in name or ".layers.4" in name]
    assert f"model.layers.{config.num_hidden_layers - 1}" in names
