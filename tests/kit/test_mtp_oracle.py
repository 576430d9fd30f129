"""Gradients of multi-token prediction layers: names, the decoder's own part, and the slope of the layers' loss."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from moeref_conformance.contract.requests.policy import WHOLE
from moeref_conformance.oracles import mtp, mtp_names, policy, routed
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.dialect import in_files
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.selftest.faults.base import cell
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected(cell("glm4_moe", "one", mtp=1), tmp_path_factory.mktemp("mtp"))


def test_every_parameter_has_one_and_copies_have_that_of_both_uses(want: Expected) -> None:
    found = mtp.under(want).gradients
    assert {name: g.shape for name, g in found.items()} == {name: t.shape for name, t in want.tensors.items()}
    without = {name for name, gradient in found.items() if bool(gradient.isnan().any())}
    assert without == {name for name in want.tensors if name.endswith("e_score_correction_bias")}
    assert torch.equal(found["model.layers.2.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["lm_head.weight"])


def test_fused_experts_have_theirs_stacked(tmp_path: Path) -> None:
    want = expected(cell("glm4_moe", "one", mtp=1, expert_format="fused"), tmp_path)
    found = mtp.under(want).gradients
    assert {name: g.shape for name, g in found.items()} == {name: t.shape for name, t in want.tensors.items()}
    assert found["model.layers.2.mlp.experts.gate_up_proj"].any()
    without = {name for name, gradient in found.items() if bool(gradient.isnan().any())}
    assert without == {name for name in want.tensors if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("which", ["native", "a"])
def test_without_their_factor_the_decoder_has_its_own(
    want: Expected, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "FACTOR", 0.0)
    routes = () if which == "native" else routed.given_routes(want, which)
    alone, decoder = mtp._computed(want, routes, mtp.OF_ALL, None).gradients, routed.under(want, which).gradients
    for name, gradient in alone.items():
        if ".layers.2." in name:
            assert name.endswith(("embed_tokens.weight", "head.weight", "correction_bias")) or not gradient.any()
        elif not name.endswith("correction_bias"):
            assert torch.allclose(gradient, decoder[name], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("part", ["eh_proj", "enorm", "hnorm", "shared_head.norm"])
def test_it_is_the_slope_of_the_loss(want: Expected, part: str) -> None:
    name = f"model.layers.2.{part}.weight"
    names = [f"model.layers.2.{one}.weight" for one in mtp.AROUND]
    gradient = mtp.under(want).gradients[name]
    step = 2e-3 * gradient / gradient.norm()

    def loss(sign: float) -> float:
        around = {one: want.tensors[one] + (sign * step if one == name else 0.0) for one in names}
        with torch.no_grad():
            return float(sum(mtp._losses(mtp._model(want, 3), 2, around, want.tokens_BS, partial(routed.labels, want))))

    assert loss(1) - loss(-1) == pytest.approx(2 * float((gradient * step).sum()), rel=0.05)


def test_they_add_the_same_to_a_policys_loss(want: Expected) -> None:
    both, beside = mtp.under(want).gradients, mtp.under(want, design=mtp.Design(policy=WHOLE)).gradients
    decoder, alone = routed.under(want, "native").gradients, policy.gradients(want)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"):
        added = both[name] - decoder[name]
        assert torch.allclose(beside[name] - alone[name], added, atol=1e-3 * float(added.abs().max()))
    assert torch.equal(beside["model.layers.2.eh_proj.weight"], both["model.layers.2.eh_proj.weight"])


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected(cell("qwen3_next", "one", layers=4, mtp=1), tmp_path_factory.mktemp("mtp"))


def test_where_files_have_the_layer_apart_it_is_loaded_and_every_parameter_has_a_gradient(apart: Expected) -> None:
    model = mtp._model(apart, 5)
    named = in_files(model, dict(model.named_parameters()))
    held = {mtp_names.standard("qwen3_next", 4, name): tensor for name, tensor in named.items()}
    for part in ("self_attn.q_proj", "mlp.experts.11.down_proj", "mlp.shared_expert_gate"):
        assert torch.equal(held[f"model.layers.4.{part}.weight"], apart.tensors[f"mtp.layers.0.{part}.weight"])
    found = mtp.under(apart).gradients
    assert {name: g.shape for name, g in found.items()} == {name: t.shape for name, t in apart.tensors.items()}
    assert not [name for name, gradient in found.items() if gradient.isnan().any()]
    assert {name for name, gradient in found.items() if not gradient.any() and ".experts." not in name} == set()


@pytest.mark.parametrize("name", ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"])
def test_its_norms_scale_by_1_and_their_weight(apart: Expected, name: str) -> None:
    """The slope of the loss, with norms written out."""
    gradient = mtp.under(apart).gradients[f"{name}.weight"]
    step = 2e-3 * gradient / gradient.norm()

    def normed(hidden_BSH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        return hidden_BSH / (hidden_BSH.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight_H)

    def loss(sign: float) -> float:
        fc, embedding_H, hidden_H, last_H = (
            apart.tensors[f"mtp.{part}.weight"] + (sign * step if name == f"mtp.{part}" else 0.0)
            for part in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        )
        model, given = mtp._model(apart, 5), {}
        layer, model.model.layers = model.model.layers[4], model.model.layers[:4]
        model.config.num_hidden_layers = 4
        model.model.layers[-1].register_forward_pre_hook(lambda *kept: given.update(kept[-1]), with_kwargs=True)
        with torch.no_grad():
            hidden_BSH = model.model(apart.tokens_BS, use_cache=False).last_hidden_state
            given.pop("hidden_states", None)
            embedded_BSH = model.model.embed_tokens(apart.tokens_BS.roll(-1, 1))
            both = torch.cat([normed(embedded_BSH, embedding_H), normed(hidden_BSH, hidden_H)], -1)
            logits_BSV = model.lm_head(normed(layer(both @ fc.T, **given), last_H))
        labels_BS = routed.labels(apart, 1)
        return 0.1 * float(torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten()))

    assert loss(1) - loss(-1) == pytest.approx(2 * float((gradient * step).sum()), rel=0.05)


def test_detached_it_trains_the_layers_alone(want: Expected) -> None:
    whole, detached = mtp.under(want).gradients, mtp.under(want, design=mtp.Design(detached=True)).gradients
    alone = routed.under(want, "native").gradients
    copies = dict(zip(mtp.COPIES, ("model.embed_tokens.weight", "lm_head.weight"), strict=True))
    for name in (name for name in want.tensors if not name.endswith("correction_bias")):
        of_layers = name.startswith("model.layers.2.")
        copied = copies.get(name.removeprefix("model.layers.2."), "") if of_layers else name
        assert torch.allclose(detached[name], alone[copied] if copied else whole[name], rtol=1e-4, atol=1e-7), name
    assert not torch.allclose(detached["lm_head.weight"], whole["lm_head.weight"], rtol=1e-2)


def test_a_token_ahead_has_its_label_where_a_row_has_such_a_token_and_the_step_trains_on_it() -> None:
    """Tokens 10 to 13, of which 13 and the first are trained on, and a row of two, all trained on."""
    tokens_BS = torch.tensor([[10, 11, 12, 13], [20, 21, -1, -1]])
    mask_BS = torch.tensor([[True, False, False, True], [True, True, False, False]])
    of = cast("Expected", SimpleNamespace(tokens_BS=tokens_BS, mask_BS=mask_BS, lengths=(4, 2)))
    none = routed.IGNORED
    assert routed.labels(of).tolist() == [[none, none, 13, 10], [21, 20, none, none]]
    assert routed.labels(of, ahead=1).tolist() == [[none, 13, 10, none], [20, none, none, none]]
    assert routed.labels(of, ahead=1, path=True).tolist() == [[none, none, 10, none], [20, none, none, none]]
    assert routed.labels(of, counted=1).tolist() == [[none, none, 13, 10], [none] * 4]
    assert routed.labels(of, ahead=3).tolist() == [[10, none, none, none], [none] * 4]


def test_a_mean_over_parts_weighs_each_the_same_and_one_without_labels_as_nothing() -> None:
    logits_BSV, none = torch.randn(2, 4, 10), routed.IGNORED
    labels_BS = torch.tensor([[1, 2, 3, none], [none, none, none, none]])
    found = float(mtp._mean(logits_BSV, labels_BS, [((0,), (0, 3)), ((0,), (1, 2)), ((1,), (0, 1, 2, 3))]))
    losses_S = torch.nn.functional.cross_entropy(logits_BSV[0, :3], labels_BS[0, :3], reduction="none")
    assert found == pytest.approx(float(losses_S[0] + losses_S[1:].mean()) / 3)
    assert float(mtp._mean(logits_BSV, labels_BS)) == pytest.approx(float(losses_S.mean()))


@pytest.mark.parametrize("axes", [{"batch": "packed"}, {"loss_mask": True}])
def test_each_label_of_a_step_weighs_the_same(axes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the row: against the sum over rows, each computed alone."""
    want = expected(cell("glm4_moe", "one", mtp=1, **axes), tmp_path)
    whole, rows = mtp.under(want).gradients["model.layers.2.eh_proj.weight"], []
    for row, length in enumerate(want.lengths):
        alone = copy.copy(want)
        vars(alone)["tokens_BS"] = want.tokens_BS[row : row + 1, :length]
        vars(alone)["mask_BS"] = want.mask_BS[row : row + 1, :length]
        number = int((routed.labels(alone, ahead=1) != routed.IGNORED).sum())
        decoder = int((routed.labels(alone) != routed.IGNORED).sum())
        if decoder:
            rows.append((number, mtp._computed(alone, (), mtp.OF_ALL, None).gradients["model.layers.2.eh_proj.weight"]))
    total = sum(number for number, _ in rows)
    joined = sum(number / total * gradient for number, gradient in rows)
    assert torch.allclose(whole, joined, rtol=1e-4, atol=1e-8)
    assert len({number for number, _ in rows}) > 1


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "minimax_m2",
        "mixtral",
        "qwen3_moe",
        "qwen3_next",
    ],
)
def test_transformers_builds_no_such_layer(family: str) -> None:
    """Once it does, its autograd is the better oracle."""
    config = AutoConfig.for_model(family, num_hidden_layers=4, num_nextn_predict_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_modules()]
    assert not [name for name in names if "mtp" in name or "nextn" in name or ".layers.4" in name]
    assert f"model.layers.{config.num_hidden_layers - 1}" in names
